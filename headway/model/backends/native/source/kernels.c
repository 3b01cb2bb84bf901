/* The decoder on a CPU, one function per operation; plain.py has the same operations in torch.

   Every output element is summed in an order that depends only on its own row: not on the number of
   rows, on how a prompt was split, or on which blocks hold its keys. A request's results are
   therefore bitwise the same whatever shares its batch. Plain C with the compiler's vector types, and
   the instructions of a CPU where the compiler would not find them. Threads are torch's own.

   Letters: M rows (tokens), K inputs, N outputs, H query heads, G key-value heads, D head size.

   All files form one compilation unit, so that everything can be inlined; each file uses only those
   that are included before it. */

#include "vectors.c"
#include "team.c"
#include "products.c"
#include "bytes.c"
#include "quantized.c"
#if defined(__ARM_FEATURE_DOTPROD)
#include "dotprod.c"
#endif
#include "norms.c"
#include "kv_floats.c"
#include "kv_bytes.c"
#include "attention.c"
#include "matrices.c"
#include "experts.c"
#include "layers.c"
