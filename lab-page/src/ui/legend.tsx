// The meaning of colours, below a pane.

export function Legend({ items }: { items: [string, string][] }) {
  return (
    <p class="legend">
      {items.map(([shade, text]) => (
        <span key={text}><i class={shade === "tick" ? "tick" : `swatch ${shade}`} /> {text}</span>
      ))}
    </p>
  );
}
