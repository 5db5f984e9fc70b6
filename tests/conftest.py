"""One thread a test process: the tests are many and small, and run side by side."""

import torch

torch.set_num_threads(1)

collect_ignore = ["flower/quick"]  # for processes of Flower's, not for this one
