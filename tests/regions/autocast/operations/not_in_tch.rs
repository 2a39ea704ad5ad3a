//! Ops of PyTorch's lists that tch cannot call.

/// An op that cannot be called through tch, and the reason.
pub struct Missing {
    pub op: &'static str,
    pub reason: &'static str,
    /// The torch versions that have it, if not all do.
    pub only_in: Option<&'static str>,
}

/// All of them. The test fails for an op that is neither here nor in the table, and for an op here that PyTorch no
/// longer has.
pub const NOT_IN_TCH: &[Missing] = &[
    Missing {
        op: "_addmm_activation",
        reason: "torch-sys passes use_gelu where libtorch takes beta: tch can neither ask for GELU nor for its own beta",
        only_in: None,
    },
    Missing {
        op: "multi_margin_loss",
        reason: "tch binds only its backward: its two numbers are optional, in front of a tensor",
        only_in: None,
    },
    Missing {
        op: "multilabel_margin_loss_forward",
        reason: "tch binds no ..._forward; multilabel_margin_loss, which calls it, is compared",
        only_in: None,
    },
    Missing {
        op: "_thnn_fused_lstm_cell",
        reason: "tch binds only its backward; lstm_cell, which calls it on CUDA, is compared",
        only_in: None,
    },
    Missing {
        op: "_thnn_fused_gru_cell",
        reason: "tch binds only its backward; gru_cell, which calls it on CUDA, is compared",
        only_in: None,
    },
    Missing {
        op: "_scaled_dot_product_flash_attention",
        reason: "tch binds only its backward; scaled_dot_product_attention, which calls it, is compared",
        only_in: None,
    },
    Missing {
        op: "_cudnn_rnn",
        reason: "its weights are a buffer that cuDNN has laid out; lstm, gru and rnn_..., which call it, have no such",
        only_in: None,
    },
    Missing {
        op: "index_copy.dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "prod.dim_Dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "cumprod.dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "cumsum.dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "log_softmax.Dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "norm.names_ScalarOpt_dim",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "softmax.Dimname",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
    Missing {
        op: "sum.dim_DimnameList",
        reason: "tch binds no op with named dimensions",
        only_in: Some("2.11"),
    },
];

/// The entry of `op`.
pub fn find(op: &str) -> Option<&'static Missing> {
    NOT_IN_TCH.iter().find(|missing| missing.op == op)
}
