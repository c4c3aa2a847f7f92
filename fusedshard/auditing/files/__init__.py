"""What saved files hold, as inventories: saved reads them, folders those that
torch.distributed.checkpoint wrote; contents finds the state dicts in them, naming says whose
numbers are whose, placing which elements a tensor is (dtensors: a DTensor)."""
