"""Products of elements and scale factors as Horovod rounds them, computed by hand, for every type.

The numbers were computed with fractions. A float32 element is multiplied by the float32 that is nearest to the factor,
a float64 element by the factor; each product is rounded once. 16-bit elements are multiplied as float32 elements, and
the product is rounded to 16 bits. Integers are multiplied in float64 and cut off.
"""

from __future__ import annotations

# By type: an element, a factor, and the element that a reduction of it alone gives.
PRODUCTS: dict[str, list[tuple[float, float, float]]] = {
    "uint8": [(77, 0.7, 53), (100, 0.29, 28), (255, 0.5, 127)],
    "int8": [(77, 0.7, 53), (-61, 0.29, -17), (-127, 0.5, -63)],
    "int16": [(77, 0.7, 53), (-61, 0.29, -17), (30_001, 0.1, 3000)],
    "int32": [(77, 0.7, 53), (100, 0.29, 28), (100, 0.57, 56), (-61, 2.3, -140)],
    "int64": [(77, 0.7, 53), (100, 0.57, 56), (3_000_000_009, 0.1, 300_000_000), (-7, 1 / 3, -2)],
    "float16": [(77.0, 0.1, 7.69921875), (77.0, 0.7, 53.90625), (77.0, 1 / 3, 25.671875), (-77.0, 2.3, -177.125)],
    "bfloat16": [(75.0, 0.595, 44.75), (-85.0, 0.725, -61.75), (75.0, 0.535, 40.25), (77.0, 2.3, 177.0)],
    "float32": [
        (77.0, 0.1, 7.700000286102295),
        (77.0, 0.7, 53.89999771118164),
        (77.0, 1 / 3, 25.666667938232422),
        (-61.0, 0.29, -17.689998626708984),
        (100.0, 1 / 3, 33.333335876464844),
        (77.0, 2.3, 177.09999084472656),
    ],
    "float64": [(77.0, 0.1, 7.7), (77.0, 1 / 3, 25.666666666666664), (-77.0, 2.3, -177.1)],
}

# By type: an element, a factor before and one after the sum, and the result, rounded after each.
BOTH: dict[str, tuple[float, float, float, float]] = {
    "uint8": (77, 0.7, 0.5, 26),
    "int8": (-61, 0.29, 2.5, -42),
    "int16": (30_001, 0.1, 0.7, 2100),
    "int32": (100, 0.57, 0.29, 16),
    "int64": (3_000_000_009, 0.1, 0.1, 30_000_000),
    "float16": (77.0, 0.1, 0.7, 5.390625),
    "bfloat16": (75.0, 0.595, 0.1, 4.46875),
    "float32": (77.0, 0.1, 0.7, 5.390000343322754),
    "float64": (77.0, 0.1, 0.7, 5.39),
}
