"""Heads: they turn hidden states into values and rewards."""

from torch import Tensor, nn


class Float32Linear(nn.Linear):
    """A linear map that is computed in float32 whatever its weights and its input are in."""

    def forward(self, input: Tensor) -> Tensor:
        """[.., H] -> [.., n] float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class ScalarHead(nn.Module):
    """A linear map from a hidden state to one number, computed in float32 whatever the backbone computes in.

    A reward head starts with standard deviation 1/sqrt(H+1) and bias 0 (lm-human-preferences, `policy.py`); a value
    head on a trunk that the policy shares starts at 0, so that the first update does not push noise into the trunk.
    """

    def __init__(self, hidden_size: int, start_at_zero: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.linear = Float32Linear(hidden_size, 1, bias=bias)
        if start_at_zero:
            nn.init.zeros_(self.linear.weight)
        else:
            nn.init.normal_(self.linear.weight, std=(hidden_size + 1) ** -0.5)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [..] float32."""
        numbers: Tensor = self.linear(hidden)
        return numbers.squeeze(-1)
