//! Ops that reduce, scan or normalise.

use tch::Tensor;

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one, three};

/// `torch.norm`; without a dimension, over the only dimension of the lists' tensor.
fn norm(a: &Args) -> Outputs {
    let (p, dim) = (a.float((1, "p")).unwrap_or(2.0), a.int((2, "dim")).unwrap_or(0));
    one(match a.kind() {
        None => a.t(0).f_norm_scalaropt_dim(p, dim, false),
        Some(kind) => a.t(0).f_norm_scalaropt_dim_dtype(p, dim, false, kind),
    })
}

/// `norm.Scalar`, over all elements.
fn norm_of_all(a: &Args) -> Outputs {
    one(match a.kind() {
        None => a.t(0).f_norm(),
        Some(kind) => a.t(0).f_norm_scalaropt_dtype(2.0, kind),
    })
}

/// `linalg_vector_norm` and `linalg_matrix_norm`, which tch has behind `linalg_norm`: the number of dimensions decides.
fn linalg_norm(a: &Args) -> Outputs {
    let (ord, dim) = (a.float(1).unwrap(), a.ints(2));
    one(a.t(0).f_linalg_norm(ord, dim, false, a.kind()))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("cdist", |a| one(Tensor::f_cdist(a.t(0), a.t(1), a.float(2).unwrap_or(2.0), a.int(3)))),
    ("cosine_similarity", |a| one(Tensor::f_cosine_similarity(a.t(0), a.t(1), 1, 1e-8))),
    ("cumprod", |a| one(a.t(0).f_cumprod(a.int(1).unwrap(), a.kind()))),
    ("cumsum", |a| one(a.t(0).f_cumsum(a.int(1).unwrap(), a.kind()))),
    ("dist", |a| one(a.t(0).f_dist(a.t(1)))),
    ("frobenius_norm", |a| one(a.t(0).f_frobenius_norm(a.ints(1).unwrap(), a.flag(2).unwrap()))),
    ("group_norm", |a| {
        one(a.t(0).f_group_norm::<&Tensor>(a.int(1).unwrap(), None, None, 1e-5, true))
    }),
    ("linalg_matrix_norm", linalg_norm),
    ("linalg_matrix_norm.str_ord", |a| {
        one(a.t(0).f_linalg_norm_ord_str(a.text(1), a.ints(2), false, a.kind()))
    }),
    ("linalg_vector_norm", linalg_norm),
    ("layer_norm", |a| {
        one(a.t(0).f_layer_norm::<&Tensor>(a.ints(1).unwrap(), None, None, 1e-5, true))
    }),
    ("log_softmax", |a| one(a.t(0).f_log_softmax(a.int(1).unwrap(), a.kind()))),
    ("logsumexp", |a| one(a.t(0).f_logsumexp(a.int(1).unwrap(), false))),
    ("nanquantile", |a| {
        let keepdim = a.flag(3).unwrap();
        one(a.t(0).f_nanquantile(a.t(1), a.int(2), keepdim, a.text("interpolation")))
    }),
    ("nanquantile.scalar", |a| {
        let (q, keepdim) = (a.float(1).unwrap(), a.flag(3).unwrap());
        one(a.t(0).f_nanquantile_scalar(q, a.int(2), keepdim, a.text("interpolation")))
    }),
    ("native_layer_norm", |a| {
        three(a.t(0).f_native_layer_norm(
            a.ints(1).unwrap(),
            a.opt(2),
            a.opt(3),
            a.float(4).unwrap(),
        ))
    }),
    ("norm", norm),
    ("norm.Scalar", norm_of_all),
    ("nuclear_norm", |a| one(a.t(0).f_nuclear_norm(a.flag(1).unwrap()))),
    ("nuclear_norm.dim", |a| {
        one(a.t(0).f_nuclear_norm_dim(a.ints(1).unwrap(), a.flag(2).unwrap()))
    }),
    ("pdist", |a| one(a.t(0).f_pdist(2.0))),
    ("prod", |a| match a.int(1) {
        Some(dim) => one(a.t(0).f_prod_dim_int(dim, a.flag(2).unwrap_or(false), a.kind())),
        None => one(a.t(0).f_prod(a.kind())),
    }),
    ("quantile", |a| {
        let keepdim = a.flag(3).unwrap();
        one(a.t(0).f_quantile(a.t(1), a.int(2), keepdim, a.text("interpolation")))
    }),
    ("quantile.scalar", |a| {
        let (q, keepdim) = (a.float(1).unwrap(), a.flag(3).unwrap());
        one(a.t(0).f_quantile_scalar(q, a.int(2), keepdim, a.text("interpolation")))
    }),
    ("renorm", |a| {
        one(a.t(0).f_renorm(a.float(1).unwrap(), a.int(2).unwrap(), a.float(3).unwrap()))
    }),
    ("rms_norm", |a| one(a.t(0).f_rms_norm(a.ints(1).unwrap(), a.opt(2), a.float(3)))),
    ("softmax", |a| one(a.t(0).f_softmax(a.int(1).unwrap(), a.kind()))),
    ("sum", |a| match a.int(1) {
        Some(dim) => one(a.t(0).f_sum_dim_intlist(dim, false, a.kind())),
        None => one(a.t(0).f_sum(a.kind())),
    }),
    ("trace", |a| one(a.t(0).f_trace())),
];
