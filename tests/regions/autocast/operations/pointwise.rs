//! Comparisons, functions of each element, and ops that combine tensors.

use tch::Tensor;

use crate::autocast::operations::table::{Entry, one};

/// Comparisons and arithmetic, which promote dtypes themselves.
pub const COMPARISONS: &[Entry] = &[
    ("eq", |a| one(a.t(0).f_eq_tensor(a.t(1)))),
    ("ge", |a| one(a.t(0).f_ge_tensor(a.t(1)))),
    ("gt", |a| one(a.t(0).f_gt_tensor(a.t(1)))),
    ("le", |a| one(a.t(0).f_le_tensor(a.t(1)))),
    ("lt", |a| one(a.t(0).f_lt_tensor(a.t(1)))),
    ("ne", |a| one(a.t(0).f_ne_tensor(a.t(1)))),
    ("add", |a| one(a.t(0).f_add(a.t(1)))),
    ("div", |a| one(a.t(0).f_div(a.t(1)))),
    ("mul", |a| one(a.t(0).f_mul(a.t(1)))),
    ("equal", |a| one(a.t(0).f_equal(a.t(1)).map(Tensor::from))),
];

/// Functions of one tensor.
pub const UNARY: &[Entry] = &[
    ("acos", |a| one(a.t(0).f_acos())),
    ("asin", |a| one(a.t(0).f_asin())),
    ("cosh", |a| one(a.t(0).f_cosh())),
    ("erfinv", |a| one(a.t(0).f_erfinv())),
    ("exp", |a| one(a.t(0).f_exp())),
    ("expm1", |a| one(a.t(0).f_expm1())),
    ("log", |a| one(a.t(0).f_log())),
    ("log10", |a| one(a.t(0).f_log10())),
    ("log2", |a| one(a.t(0).f_log2())),
    ("log1p", |a| one(a.t(0).f_log1p())),
    ("reciprocal", |a| one(a.t(0).f_reciprocal())),
    ("rsqrt", |a| one(a.t(0).f_rsqrt())),
    ("sinh", |a| one(a.t(0).f_sinh())),
    ("softplus", |a| one(a.t(0).f_softplus())),
    ("tan", |a| one(a.t(0).f_tan())),
    ("view_as_complex", |a| one(a.t(0).f_view_as_complex())),
];

/// The other ops.
pub const OTHERS: &[Entry] = &[
    ("pow", |a| match a.is_tensor(1) {
        true => one(a.t(0).f_pow(a.t(1))),
        false => one(a.t(0).f_pow_tensor_scalar(a.float(1).unwrap())),
    }),
    ("pow.Scalar", |a| one(Tensor::f_pow_scalar(a.float(0).unwrap(), a.t(1)))),
    ("addcdiv", |a| one(a.t(0).f_addcdiv(a.t(1), a.t(2)))),
    ("addcmul", |a| one(a.t(0).f_addcmul(a.t(1), a.t(2)))),
    ("atan2", |a| one(a.t(0).f_atan2(a.t(1)))),
    ("cat", |a| one(Tensor::f_cat(&a.ts(0), a.int(1).unwrap_or(0)))),
    ("fake_quantize_per_tensor_affine", |a| {
        let [zero_point, low, high] = [2, 3, 4].map(|i| a.int(i).unwrap());
        one(a.t(0).f_fake_quantize_per_tensor_affine(a.float(1).unwrap(), zero_point, low, high))
    }),
    ("index_copy", |a| one(a.t(0).f_index_copy(a.int(1).unwrap(), a.t(2), a.t(3)))),
    ("index_put", |a| {
        let indices: Vec<_> = a.ts(1).into_iter().map(Some).collect();
        one(a.t(0).f_index_put(&indices, a.t(2), false))
    }),
    ("polar", |a| one(Tensor::f_polar(a.t(0), a.t(1)))),
    ("prelu", |a| one(a.t(0).f_prelu(a.t(1)))),
    ("scatter_add", |a| one(a.t(0).f_scatter_add(a.int(1).unwrap(), a.t(2), a.t(3)))),
    ("stack", |a| one(Tensor::f_stack(&a.ts(0), a.int(1).unwrap_or(0)))),
];
