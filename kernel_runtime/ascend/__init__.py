"""The Ascend gate: compiles registered kernels to HIVM with no NPU. Run by `make ascend-check`; see docs/ascend.md for what it can show."""
