//! Every operation that the manual of `torch.amp` lists is found by its name in the guide's page, on the list that the
//! manual says.

use std::collections::BTreeMap;

use crate::autocast::operations::page::{self, F32, F32_UNLESS_ASKED, HALF, WIDEST};
use testkit::python::Oracle;

/// A device, the lists of the page that are one in the manual, and the names there.
type Listed = (&'static str, &'static [&'static str], &'static str);

/// The lists of the manual of 2.13.
const MANUAL: [Listed; 6] = [
    (
        "cuda",
        &[HALF],
        "__matmul__ addbmm addmm addmv addr baddbmm bmm multi_dot conv1d conv2d conv3d conv_transpose1d \
         conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell",
    ),
    (
        "cuda",
        &[F32, F32_UNLESS_ASKED],
        "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss \
         cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss \
         kl_div l1_loss layer_norm log log_softmax log10 log1p log2 margin_ranking_loss mse_loss \
         multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal \
         rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss",
    ),
    (
        "cuda",
        &[WIDEST],
        "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot",
    ),
    (
        "cpu",
        &[HALF],
        "conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear matmul _convolution conv_tbc \
         mkldnn_rnn_layer conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention \
         _native_multi_head_attention",
    ),
    (
        "cpu",
        &[F32],
        "avg_pool3d binary_cross_entropy grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d \
         polar prod quantile nanquantile stft cdist trace view_as_complex cholesky_inverse cholesky_solve inverse \
         lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d \
         reflection_pad2d replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss \
         nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss cross_entropy_loss l1_loss huber_loss \
         margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div \
         multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn \
         fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond \
         linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv \
         linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf \
         _lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d \
         multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq \
         linalg_inv_ex",
    ),
    ("cpu", &[WIDEST], "cat stack index_copy"),
];

/// Operations on the CPU's f32 list in the manuals up to 2.4, and their lists today.
const MOVED: [(&str, Option<&str>); 8] = [
    ("conv_transpose1d", Some(HALF)),
    ("conv_transpose2d", Some(HALF)),
    ("conv_transpose3d", Some(HALF)),
    ("linalg_matrix_norm", None),
    ("eig", None),
    ("lstsq", None),
    ("solve", None),
    ("symeig", None),
];

/// What the manual names as Python does, and the operators of CUDA's lists that it calls.
const RENAMED: [(&str, &[&str]); 13] = [
    ("__matmul__", &["matmul"]),
    ("multi_dot", &["linalg_multi_dot"]),
    ("GRUCell", &["gru_cell"]),
    ("LSTMCell", &["lstm_cell"]),
    ("RNNCell", &["rnn_tanh_cell", "rnn_relu_cell"]),
    ("__pow__", &["pow"]),
    ("__rpow__", &["pow"]),
    ("__rdiv__", &["reciprocal"]),
    ("__rtruediv__", &["reciprocal"]),
    ("cross_entropy", &["log_softmax", "nll_loss"]),
    ("normalize", &["linalg_vector_norm"]),
    ("softmin", &["softmax"]),
    ("grid_sample", &["grid_sampler"]),
];

/// The operators of a name in the manual.
fn operators(name: &'static str) -> Vec<&'static str> {
    let renamed = RENAMED.iter().find(|(renamed, _)| *renamed == name);
    renamed.map_or_else(|| vec![name], |(_, operators)| operators.to_vec())
}

fn quoted(name: &str) -> String {
    format!("`{name}`")
}

#[test]
fn every_operation_of_the_manual_is_on_the_page() {
    let (page, lists) = (page::text(), page::lists_of_all_versions());
    for (device, wanted, names) in MANUAL {
        for name in names.split_whitespace() {
            assert!(page.contains(&quoted(name)), "the page does not mention {name}");
            for operator in operators(name) {
                let list = lists.get(&(device, operator.to_owned()));
                let list = list.unwrap_or_else(|| panic!("{operator} is on no list on {device}"));
                assert!(wanted.contains(&list.as_str()), "{operator} is on {list} on {device}");
            }
        }
    }
    for (name, wanted) in MOVED {
        let list = lists.get(&("cpu", name.to_owned())).map(String::as_str);
        assert_eq!(list, wanted, "{name}");
        assert!(page.contains(&quoted(name)), "the page does not mention {name}");
    }
}

#[test]
fn the_page_translates_the_names_of_the_manual() {
    let page = page::text();
    let calls: Option<BTreeMap<String, Vec<String>>> = Oracle::find("manual_operators.py")
        .map(|oracle| serde_json::from_str(&oracle.run(&[], "")).expect("it prints JSON"));
    for (name, operators) in RENAMED {
        let row = page.lines().find(|line| line.starts_with('|') && line.contains(&quoted(name)));
        let row = row.unwrap_or_else(|| panic!("the page has no row for {name}"));
        for operator in operators {
            assert!(row.contains(&quoted(operator)), "{name}: {row}");
            let called =
                calls.as_ref().is_none_or(|calls| calls[name].iter().any(|o| o == operator));
            assert!(called, "{name} does not call {operator}");
        }
    }
}
