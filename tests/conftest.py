"""Settings of the whole suite."""

import torch

# Two test processes run side by side. A second thread each would gain nothing on two cores, and
# threads that outnumber the cores wait for one another by spinning.
torch.set_num_threads(1)
