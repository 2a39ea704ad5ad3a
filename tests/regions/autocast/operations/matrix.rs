//! Products of matrices, and attention: the lower-precision list except for the convolutions.

use tch::Tensor;

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one, two};

fn attention(a: &Args) -> Outputs {
    let (dim, heads) = (a.int(3).unwrap(), a.int(4).unwrap());
    let [qkv_weight, qkv_bias, weight, bias] = [5, 6, 7, 8].map(|i: usize| a.t(i));
    two(Tensor::f_internal_native_multi_head_attention::<&Tensor>(
        a.t(0),
        a.t(1),
        a.t(2),
        dim,
        heads,
        qkv_weight,
        qkv_bias,
        weight,
        bias,
        None,
        true,
        true,
        None,
    ))
}

fn scaled_dot_product_attention(a: &Args) -> Outputs {
    let [q, k, v] = [0, 1, 2].map(|i: usize| a.t(i));
    let (mask, dropout, causal) = (a.opt(3), a.float(4).unwrap(), a.flag(5).unwrap());
    one(Tensor::f_scaled_dot_product_attention(q, k, v, mask, dropout, causal, None, false))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("_native_multi_head_attention", attention),
    ("addbmm", |a| one(a.t(0).f_addbmm(a.t(1), a.t(2)))),
    ("addmm", |a| one(a.t(0).f_addmm(a.t(1), a.t(2)))),
    ("addmv", |a| one(a.t(0).f_addmv(a.t(1), a.t(2)))),
    ("addr", |a| one(a.t(0).f_addr(a.t(1), a.t(2)))),
    ("baddbmm", |a| {
        let [beta, alpha] = ["beta", "alpha"].map(|name| a.float(name).unwrap_or(1.0));
        one(a.t(0).f_baddbmm(a.t(1), a.t(2), beta, alpha))
    }),
    ("bilinear", |a| one(Tensor::f_bilinear(a.t(0), a.t(1), a.t(2), a.opt(3)))),
    ("bmm", |a| one(a.t(0).f_bmm(a.t(1)))),
    ("chain_matmul", |a| {
        // As separate arguments, like torch.chain_matmul's, or as a list, like the dispatcher's.
        one(match a.is_tensor(0) {
            true => Tensor::f_chain_matmul(&(0..a.count()).map(|i| a.t(i)).collect::<Vec<_>>()),
            false => Tensor::f_chain_matmul(&a.ts(0)),
        })
    }),
    ("cross", |a| one(a.t(0).f_cross(a.t(1), None))),
    ("dot", |a| one(a.t(0).f_dot(a.t(1)))),
    ("einsum", |a| one(Tensor::f_einsum(a.text(0), &a.ts(1), None::<Vec<i64>>))),
    ("linalg_multi_dot", |a| one(Tensor::f_linalg_multi_dot(&a.ts(0)))),
    ("linalg_vecdot", |a| one(Tensor::f_linalg_vecdot(a.t(0), a.t(1), a.int("dim").unwrap_or(-1)))),
    ("linear", |a| one(a.t(0).f_linear(a.t(1), a.opt(2)))),
    ("matmul", |a| one(a.t(0).f_matmul(a.t(1)))),
    ("mm", |a| one(a.t(0).f_mm(a.t(1)))),
    ("mv", |a| one(a.t(0).f_mv(a.t(1)))),
    ("scaled_dot_product_attention", scaled_dot_product_attention),
    ("tensordot", |a| one(a.t(0).f_tensordot(a.t(1), [1, 2].as_slice(), [0, 1].as_slice()))),
    ("vdot", |a| one(a.t(0).f_vdot(a.t(1)))),
];
