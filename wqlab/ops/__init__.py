"""Operations with more than one implementation: a plain torch reference that is the truth, and kernels that are held to it."""
