//! Ops of PyTorch's lists that tch cannot call.

/// An op that cannot be called through tch, and the reason.
pub struct Missing {
    pub op: &'static str,
    pub reason: &'static str,
    /// The torch versions that have it, if not all do.
    pub only_in: Option<&'static str>,
}

/// An op that names dimensions.
const fn named(op: &'static str) -> Missing {
    Missing { op, reason: "tch binds no op with named dimensions", only_in: Some("2.11") }
}

const fn missing(op: &'static str, reason: &'static str) -> Missing {
    Missing { op, reason, only_in: None }
}

/// All of them. The test fails for an op that is neither here nor in the table, and for an op here that PyTorch no
/// longer has.
pub const NOT_IN_TCH: &[Missing] = &[
    missing(
        "_addmm_activation",
        "torch-sys passes use_gelu where libtorch takes beta: tch can neither ask for GELU nor for its own beta",
    ),
    missing(
        "multi_margin_loss",
        "tch binds only its backward: its two numbers are optional, in front of a tensor",
    ),
    missing(
        "multilabel_margin_loss_forward",
        "tch binds no ..._forward; multilabel_margin_loss, which calls it, is compared",
    ),
    missing(
        "_thnn_fused_lstm_cell",
        "tch binds only its backward; lstm_cell, which calls it on CUDA, is compared",
    ),
    missing(
        "_thnn_fused_gru_cell",
        "tch binds only its backward; gru_cell, which calls it on CUDA, is compared",
    ),
    missing(
        "_scaled_dot_product_flash_attention",
        "tch binds only its backward; scaled_dot_product_attention, which calls it, is compared",
    ),
    missing(
        "_cudnn_rnn",
        "its weights are a buffer that cuDNN has laid out; lstm, gru and rnn_..., which call it, have no such",
    ),
    named("index_copy.dimname"),
    named("prod.dim_Dimname"),
    named("cumprod.dimname"),
    named("cumsum.dimname"),
    named("log_softmax.Dimname"),
    named("norm.names_ScalarOpt_dim"),
    named("softmax.Dimname"),
    named("sum.dim_DimnameList"),
];

/// The entry of `op`.
pub fn find(op: &str) -> Option<&'static Missing> {
    NOT_IN_TCH.iter().find(|missing| missing.op == op)
}
