//! Losses.

use tch::Tensor;

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one};

fn ctc_loss_of_lists(a: &Args) -> Outputs {
    let (lengths, target_lengths) = (a.ints(2).unwrap(), a.ints(3).unwrap());
    let (blank, reduction, zero) = (a.int(4).unwrap(), a.reduction(5), a.flag(6).unwrap());
    one(Tensor::f_ctc_loss(a.t(0), a.t(1), lengths, target_lengths, blank, reduction, zero))
}

fn ctc_loss_of_tensors(a: &Args) -> Outputs {
    let (lengths, target_lengths) = (a.t(2), a.t(3));
    let (blank, reduction, zero) = (a.int(4).unwrap(), a.reduction(5), a.flag(6).unwrap());
    one(Tensor::f_ctc_loss_tensor(a.t(0), a.t(1), lengths, target_lengths, blank, reduction, zero))
}

fn triplet_margin_loss(a: &Args) -> Outputs {
    let [margin, p, eps] = [(3, 1.0), (4, 2.0), (5, 1e-6)].map(|(i, or)| a.float(i).unwrap_or(or));
    let (swap, reduction) = (a.flag(6).unwrap_or(false), a.reduction(7));
    one(Tensor::f_triplet_margin_loss(a.t(0), a.t(1), a.t(2), margin, p, eps, swap, reduction))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("binary_cross_entropy", |a| {
        one(a.t(0).f_binary_cross_entropy(a.t(1), a.opt(2), a.reduction(3)))
    }),
    ("binary_cross_entropy_with_logits", |a| {
        let (weight, positive) = (a.opt(2), a.opt(3));
        one(a.t(0).f_binary_cross_entropy_with_logits(a.t(1), weight, positive, a.reduction(4)))
    }),
    ("cosine_embedding_loss", |a| {
        let (margin, reduction) = (a.float(3).unwrap_or(0.0), a.reduction(4));
        one(Tensor::f_cosine_embedding_loss(a.t(0), a.t(1), a.t(2), margin, reduction))
    }),
    ("cross_entropy_loss", |a| {
        let (ignored, smoothing) = (a.int(4).unwrap(), a.float(5).unwrap());
        let (weight, reduction) = (a.opt(2), a.reduction(3));
        one(a.t(0).f_cross_entropy_loss(a.t(1), weight, reduction, ignored, smoothing))
    }),
    ("ctc_loss.IntList", ctc_loss_of_lists),
    ("ctc_loss.Tensor", ctc_loss_of_tensors),
    ("hinge_embedding_loss", |a| {
        let margin = a.float(2).unwrap_or(1.0);
        one(a.t(0).f_hinge_embedding_loss(a.t(1), margin, a.reduction(3)))
    }),
    ("huber_loss", |a| one(a.t(0).f_huber_loss(a.t(1), a.reduction(2), a.float(3).unwrap_or(1.0)))),
    ("kl_div", |a| {
        let log_target = a.flag("log_target").unwrap_or(false);
        one(a.t(0).f_kl_div(a.t(1), a.reduction(2), log_target))
    }),
    ("l1_loss", |a| one(a.t(0).f_l1_loss(a.t(1), a.reduction(2)))),
    ("margin_ranking_loss", |a| {
        let (margin, reduction) = (a.float(3).unwrap_or(0.0), a.reduction(4));
        one(Tensor::f_margin_ranking_loss(a.t(0), a.t(1), a.t(2), margin, reduction))
    }),
    ("mse_loss", |a| one(a.t(0).f_mse_loss(a.t(1), a.reduction(2)))),
    ("multilabel_margin_loss", |a| one(a.t(0).f_multilabel_margin_loss(a.t(1), a.reduction(2)))),
    ("nll_loss", |a| {
        let ignored = a.int(4).unwrap_or(-100);
        one(a.t(0).f_nll_loss(a.t(1), a.opt(2), a.reduction(3), ignored))
    }),
    ("nll_loss2d", |a| {
        let ignored = a.int(4).unwrap_or(-100);
        one(a.t(0).f_nll_loss2d(a.t(1), a.opt(2), a.reduction(3), ignored))
    }),
    ("poisson_nll_loss", |a| {
        let [log_input, full] = [2, 3].map(|i: usize| a.flag(i).unwrap());
        let (eps, reduction) = (a.float(4).unwrap(), a.reduction(5));
        one(a.t(0).f_poisson_nll_loss(a.t(1), log_input, full, eps, reduction))
    }),
    ("smooth_l1_loss", |a| {
        one(a.t(0).f_smooth_l1_loss(a.t(1), a.reduction(2), a.float(3).unwrap_or(1.0)))
    }),
    ("soft_margin_loss", |a| one(a.t(0).f_soft_margin_loss(a.t(1), a.reduction(2)))),
    ("triplet_margin_loss", triplet_margin_loss),
];
