"""Former and possible defects, each as a small patch: what the tests find of them is counted (make test-defects)."""
