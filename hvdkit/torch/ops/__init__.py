"""Operations on PyTorch's tensors, by name."""
