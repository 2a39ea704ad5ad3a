//! Ops that reduce, scan or normalise.

use tch::Tensor;

use crate::args::Args;
use crate::table::{Entry, NO_KIND, Outputs, one};

/// `torch.norm`: with no dimension named, of all of the one that the lists' tensor has.
fn norm(a: &Args) -> Outputs {
    let (p, dim) = (a.float((1, "p")).unwrap_or(2.0), a.int((2, "dim")).unwrap_or(0));
    one(a.t(0).f_norm_scalaropt_dim(p, dim, false))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("cdist", |a| one(Tensor::f_cdist(a.t(0), a.t(1), a.float(2).unwrap_or(2.0), a.int(3)))),
    ("cosine_similarity", |a| one(Tensor::f_cosine_similarity(a.t(0), a.t(1), 1, 1e-8))),
    ("cumprod", |a| one(a.t(0).f_cumprod(a.int(1).unwrap(), NO_KIND))),
    ("cumsum", |a| one(a.t(0).f_cumsum(a.int(1).unwrap(), NO_KIND))),
    ("dist", |a| one(a.t(0).f_dist(a.t(1)))),
    ("group_norm", |a| {
        one(a.t(0).f_group_norm::<&Tensor>(a.int(1).unwrap(), None, None, 1e-5, true))
    }),
    ("layer_norm", |a| {
        one(a.t(0).f_layer_norm::<&Tensor>(a.ints(1).unwrap(), None, None, 1e-5, true))
    }),
    ("log_softmax", |a| one(a.t(0).f_log_softmax(a.int(1).unwrap(), NO_KIND))),
    ("logsumexp", |a| one(a.t(0).f_logsumexp(a.int(1).unwrap(), false))),
    ("nanquantile", |a| {
        let keepdim = a.flag(3).unwrap();
        one(a.t(0).f_nanquantile(a.t(1), a.int(2), keepdim, a.text("interpolation")))
    }),
    ("nanquantile.scalar", |a| {
        let (q, keepdim) = (a.float(1).unwrap(), a.flag(3).unwrap());
        one(a.t(0).f_nanquantile_scalar(q, a.int(2), keepdim, a.text("interpolation")))
    }),
    ("norm", norm),
    ("pdist", |a| one(a.t(0).f_pdist(2.0))),
    ("prod", |a| match a.int(1) {
        Some(dim) => one(a.t(0).f_prod_dim_int(dim, a.flag(2).unwrap_or(false), NO_KIND)),
        None => one(a.t(0).f_prod(NO_KIND)),
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
    ("softmax", |a| one(a.t(0).f_softmax(a.int(1).unwrap(), NO_KIND))),
    ("sum", |a| match a.int(1) {
        Some(dim) => one(a.t(0).f_sum_dim_intlist(dim, false, NO_KIND)),
        None => one(a.t(0).f_sum(NO_KIND)),
    }),
    ("trace", |a| one(a.t(0).f_trace())),
];
