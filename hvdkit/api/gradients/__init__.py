"""What an optimizer or a tape is asked, which gradients go together, and which codec encodes them."""
