"""Operations on TensorFlow's tensors, by name, eagerly and in graphs."""
