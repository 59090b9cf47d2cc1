"""A slow, obvious NumPy float64 transcription of the method, written from the paper and not from the code under test.

A space is a list of variables, each the number of its entries: 1 for a bit, K >= 2 for a choice of K options. So
``[1, 1, 3]`` is two bits and a choice of three. A cost is a list of terms ``(scale, [(weights, constant), ..])``, each
scale times the product of the linear forms ``constant + sum_i weights[i] m[i]``. Everything else is loops over these.
"""
