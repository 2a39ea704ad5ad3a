//! Matrix factorisations and functions that use them.

use tch::Tensor;

use crate::autocast::operations::table::{Entry, four, one, three, two};

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("_lu_with_info", |a| {
        three(a.t(0).f_internal_lu_with_info(a.flag(1).unwrap(), a.flag(2).unwrap()))
    }),
    ("cholesky", |a| one(a.t(0).f_cholesky(a.flag(1).unwrap()))),
    ("cholesky_inverse", |a| one(a.t(0).f_cholesky_inverse(a.flag(1).unwrap()))),
    ("cholesky_solve", |a| one(a.t(0).f_cholesky_solve(a.t(1), a.flag(2).unwrap()))),
    ("geqrf", |a| two(a.t(0).f_geqrf())),
    ("inverse", |a| one(a.t(0).f_inverse())),
    ("linalg_cholesky", |a| one(a.t(0).f_linalg_cholesky(a.flag("upper").unwrap()))),
    ("linalg_cholesky_ex", |a| {
        let [upper, check] = ["upper", "check_errors"].map(|name| a.flag(name).unwrap());
        two(a.t(0).f_linalg_cholesky_ex(upper, check))
    }),
    ("linalg_cond", |a| one(a.t(0).f_linalg_cond(a.int(1).unwrap()))),
    ("linalg_cond.p_str", |a| one(a.t(0).f_linalg_cond_p_str(a.text(1)))),
    ("linalg_eig", |a| two(a.t(0).f_linalg_eig())),
    ("linalg_eigh", |a| two(a.t(0).f_linalg_eigh(a.text(1)))),
    ("linalg_eigvals", |a| one(a.t(0).f_linalg_eigvals())),
    ("linalg_eigvalsh", |a| one(a.t(0).f_linalg_eigvalsh(a.text(1)))),
    ("linalg_householder_product", |a| one(a.t(0).f_linalg_householder_product(a.t(1)))),
    ("linalg_inv", |a| one(Tensor::f_linalg_inv(a.t(0)))),
    ("linalg_inv_ex", |a| two(Tensor::f_linalg_inv_ex(a.t(0), a.flag("check_errors").unwrap()))),
    ("linalg_lstsq", |a| four(a.t(0).f_linalg_lstsq(a.t(1), a.float(2), a.text("driver")))),
    ("linalg_matrix_rank", |a| {
        one(a.t(0).f_linalg_matrix_rank(a.float(1).unwrap(), a.flag(2).unwrap()))
    }),
    ("linalg_matrix_rank.atol_rtol_float", |a| {
        let (atol, rtol) = (a.float("atol"), a.float("rtol"));
        let hermitian = a.flag("hermitian").unwrap();
        one(a.t(0).f_linalg_matrix_rank_atol_rtol_float(atol, rtol, hermitian))
    }),
    ("linalg_matrix_rank.atol_rtol_tensor", |a| {
        let (atol, rtol) = (a.opt("atol"), a.opt("rtol"));
        let hermitian = a.flag("hermitian").unwrap();
        one(a.t(0).f_linalg_matrix_rank_atol_rtol_tensor(atol, rtol, hermitian))
    }),
    ("linalg_matrix_rank.tol_tensor", |a| {
        one(a.t(0).f_linalg_matrix_rank_tol_tensor(a.t(1), a.flag(2).unwrap()))
    }),
    ("linalg_qr", |a| two(Tensor::f_linalg_qr(a.t(0), a.text(1)))),
    ("linalg_solve", |a| one(Tensor::f_linalg_solve(a.t(0), a.t(1), a.flag("left").unwrap()))),
    ("linalg_svd", |a| three(Tensor::f_linalg_svd(a.t(0), a.flag(1).unwrap(), a.text("driver")))),
    ("linalg_svdvals", |a| one(Tensor::f_linalg_svdvals(a.t(0), a.text("driver")))),
    ("linalg_tensorinv", |a| one(a.t(0).f_linalg_tensorinv(a.int(1).unwrap()))),
    ("linalg_tensorsolve", |a| one(a.t(0).f_linalg_tensorsolve(a.t(1), a.ints(2)))),
    ("lu_solve", |a| one(a.t(0).f_lu_solve(a.t(1), a.t(2)))),
    ("orgqr", |a| one(a.t(0).f_orgqr(a.t(1)))),
    ("ormqr", |a| one(a.t(0).f_ormqr(a.t(1), a.t(2), a.flag(3).unwrap(), a.flag(4).unwrap()))),
    ("pinverse", |a| one(a.t(0).f_pinverse(a.float(1).unwrap()))),
    ("qr", |a| two(a.t(0).f_qr(a.flag(1).unwrap()))),
    ("svd", |a| three(a.t(0).f_svd(a.flag(1).unwrap(), a.flag(2).unwrap()))),
    ("triangular_solve", |a| {
        let [upper, transpose, unit] = [2, 3, 4].map(|i: usize| a.flag(i).unwrap());
        two(a.t(0).f_triangular_solve(a.t(1), upper, transpose, unit))
    }),
];
