"""Model sizes of our rows that torchtitan does not ship; torchtitan imports this (``experimental.custom_import``)."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

#: FFN width 8192 = 8/3 * 3072; embedding and head untied, as all of torchtitan's Llamas.
llama3_args["3B"] = TransformerModelArgs(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, rope_theta=500000)
