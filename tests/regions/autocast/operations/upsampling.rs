//! Upsampling, all of which is on CUDA's f32 list.

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, one};

/// The size of the output.
fn size(a: &Args) -> Vec<i64> {
    a.ints(1).unwrap()
}

/// Whether the corners are aligned.
fn aligned(a: &Args) -> bool {
    a.flag(2).unwrap()
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("_upsample_bicubic2d_aa", |a| {
        one(a.t(0).f_internal_upsample_bicubic2d_aa(size(a), aligned(a), None, None))
    }),
    ("_upsample_bilinear2d_aa", |a| {
        one(a.t(0).f_internal_upsample_bilinear2d_aa(size(a), aligned(a), None, None))
    }),
    ("_upsample_nearest_exact1d", |a| {
        one(a.t(0).f_internal_upsample_nearest_exact1d(size(a), None))
    }),
    ("_upsample_nearest_exact2d", |a| {
        one(a.t(0).f_internal_upsample_nearest_exact2d(size(a), None, None))
    }),
    ("_upsample_nearest_exact3d", |a| {
        one(a.t(0).f_internal_upsample_nearest_exact3d(size(a), None, None, None))
    }),
    ("upsample_bicubic2d", |a| one(a.t(0).f_upsample_bicubic2d(size(a), aligned(a), None, None))),
    ("upsample_bilinear2d", |a| one(a.t(0).f_upsample_bilinear2d(size(a), aligned(a), None, None))),
    ("upsample_linear1d", |a| one(a.t(0).f_upsample_linear1d(size(a), aligned(a), None))),
    ("upsample_nearest1d", |a| one(a.t(0).f_upsample_nearest1d(size(a), None))),
    ("upsample_nearest2d", |a| one(a.t(0).f_upsample_nearest2d(size(a), None, None))),
    ("upsample_nearest3d", |a| one(a.t(0).f_upsample_nearest3d(size(a), None, None, None))),
    ("upsample_trilinear3d", |a| {
        one(a.t(0).f_upsample_trilinear3d(size(a), aligned(a), None, None, None))
    }),
];
