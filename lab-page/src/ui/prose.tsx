// A text in which commands, settings and names of requests are between backticks.

export function Prose({ text }: { text: string }) {
  const parts = text.split("`");
  return <span>{parts.map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</span>;
}
