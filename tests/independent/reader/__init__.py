"""Read slimtensors files with NumPy alone: a second implementation, written from the format pages.

It shares no code with the library and imports neither slimtensors nor torch nor safetensors. It
trades speed for clarity; each module follows one page:

- `container`: safetensors files, manifest, blobs (format.md), `states` (format.md)
- `codecs`: parts to items (format.md), `huffman` (format-huffman.md), `bins` (format-bins.md),
  `masks` (format-masks.md), `quantized` (quantization-formats.md)
- `deltas`, `checkpoints` (format-checkpoints.md), `distributed` (format-distributed.md)
"""
