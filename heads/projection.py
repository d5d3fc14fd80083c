"""Query, key and value weights of a layer as the steps of a chain use them: laid end to end, made once for all steps.

One product gives all three. The first layer of an EAGLE-3 head multiplies [token side ; feature], and what the token side
adds is the same wherever a token is read: step i at slot t reads the token that step 0 reads at slot t + i. So the
weight is cut in two, the token side is multiplied once for a whole pack, and its rows are added where they are read.

Shapes: T rows, X width of the varying input, W width of the token side, O = (N + 2M) E, Q = N E.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.heads.layers import DraftAttention


class Projections:
    """Weights of one layer in the dtype of products."""

    def __init__(self, attention: DraftAttention, *, token_width: int) -> None:
        """
        Args:
            token_width: W, the columns of the weights that multiply the token side; 0 in most layers.
        """
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight_OX = product_dtype(torch.cat(tuple(part.weight for part in parts)))
        biases = tuple(part.bias for part in parts if part.bias is not None)
        self.query_width = attention.q_proj.out_features
        self.token_width = token_width
        self.bias_O = torch.cat(biases) if biases else None
        token_OW, self.weight_OX = weight_OX.split((token_width, weight_OX.shape[1] - token_width), dim=1)
        self.token_weight_OW = token_OW if token_width else None

    def token_queries(self, token_TW: Tensor) -> Tensor | None:
        """What the token side adds to queries [T, Q]; None in a layer without one."""
        return self._token_product(token_TW, slice(None, self.query_width))

    def token_keys_values(self, token_TW: Tensor) -> Tensor | None:
        """What the token side adds to keys and values [T, O - Q]."""
        return self._token_product(token_TW, slice(self.query_width, None))

    def token_all(self, token_TW: Tensor) -> Tensor | None:
        """What the token side adds to queries, keys and values [T, O]."""
        return self._token_product(token_TW, slice(None))

    def queries(self, input_TX: Tensor, *, token_TQ: Tensor | None) -> Tensor:
        """Queries [T, Q] before norm and rotation."""
        return self._product(input_TX, slice(None, self.query_width), token_TQ)

    def keys_values(self, input_TX: Tensor, *, token: Tensor | None) -> Tensor:
        """Keys and values side by side [T, O - Q], before norm and rotation."""
        return self._product(input_TX, slice(self.query_width, None), token)

    def all(self, input_TX: Tensor, *, token_TO: Tensor | None) -> Tensor:
        """Queries, keys and values side by side [T, O], before norm and rotation."""
        return self._product(input_TX, slice(None), token_TO)

    def _token_product(self, token_TW: Tensor, outputs: slice) -> Tensor | None:
        if self.token_weight_OW is None:
            return None
        bias = None if self.bias_O is None else self.bias_O[outputs]
        return F.linear(token_TW, self.token_weight_OW[outputs], bias)

    def _product(self, input_TX: Tensor, outputs: slice, token: Tensor | None) -> Tensor:
        weight = self.weight_OX[outputs]
        if token is None:
            return F.linear(input_TX, weight, None if self.bias_O is None else self.bias_O[outputs])
        return torch.addmm(token, input_TX.to(token.dtype), weight.T)


def product_dtype(weight: Tensor) -> Tensor:
    """A weight in autocast's dtype: autocast remembers the casts of parameters, but not of what is made from them."""
    device = weight.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight
