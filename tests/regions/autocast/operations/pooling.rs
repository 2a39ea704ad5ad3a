//! Pooling, padding and sampling of images and volumes.

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one, two};

fn avg_pool3d(a: &Args) -> Outputs {
    let (kernel, stride) = (a.ints((1, "kernel_size")).unwrap(), a.ints((2, "stride")).unwrap());
    let (padding, ceil) = (a.each(3, 0, 3), a.flag(4).unwrap_or(false));
    let (count_pad, divisor) = (a.flag(5).unwrap_or(true), a.int(6));
    one(a.t(0).f_avg_pool3d(kernel, stride, padding, ceil, count_pad, divisor))
}

fn max_pool3d(a: &Args) -> Outputs {
    let [kernel, stride, padding, dilation] = [1, 2, 3, 4].map(|i: usize| a.ints(i).unwrap());
    one(a.t(0).f_max_pool3d(kernel, stride, padding, dilation, a.flag(5).unwrap()))
}

/// Interpolation, padding mode and whether the corners are aligned.
fn sampling(a: &Args) -> (i64, i64, bool) {
    (a.int(2).unwrap(), a.int(3).unwrap(), a.flag(4).unwrap())
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("_grid_sampler_2d_cpu_fallback", |a| {
        let (interpolation, padding, aligned) = sampling(a);
        let (input, grid) = (a.t(0), a.t(1));
        one(input.f_internal_grid_sampler_2d_cpu_fallback(grid, interpolation, padding, aligned))
    }),
    ("adaptive_avg_pool3d", |a| one(a.t(0).f_adaptive_avg_pool3d(a.ints(1).unwrap()))),
    ("adaptive_max_pool3d", |a| two(a.t(0).f_adaptive_max_pool3d(a.ints(1).unwrap()))),
    ("avg_pool3d", avg_pool3d),
    ("fractional_max_pool2d", |a| {
        let (kernel, output) = (a.ints(1).unwrap(), a.ints(2).unwrap());
        two(a.t(0).f_fractional_max_pool2d(kernel, output, a.t(3)))
    }),
    ("fractional_max_pool3d", |a| {
        let (kernel, output) = (a.ints(1).unwrap(), a.ints(2).unwrap());
        two(a.t(0).f_fractional_max_pool3d(kernel, output, a.t(3)))
    }),
    ("grid_sampler", |a| {
        let (interpolation, padding, aligned) = sampling(a);
        one(a.t(0).f_grid_sampler(a.t(1), interpolation, padding, aligned))
    }),
    ("grid_sampler_2d", |a| {
        let (interpolation, padding, aligned) = sampling(a);
        one(a.t(0).f_grid_sampler_2d(a.t(1), interpolation, padding, aligned))
    }),
    ("grid_sampler_3d", |a| {
        let (interpolation, padding, aligned) = sampling(a);
        one(a.t(0).f_grid_sampler_3d(a.t(1), interpolation, padding, aligned))
    }),
    ("max_pool3d", max_pool3d),
    ("max_unpool2d", |a| one(a.t(0).f_max_unpool2d(a.t(1), a.ints(2).unwrap()))),
    ("max_unpool3d", |a| {
        let [size, stride, padding] = [2, 3, 4].map(|i: usize| a.ints(i).unwrap());
        one(a.t(0).f_max_unpool3d(a.t(1), size, stride, padding))
    }),
    ("reflection_pad1d", |a| one(a.t(0).f_reflection_pad1d(a.ints((1, "padding")).unwrap()))),
    ("reflection_pad2d", |a| one(a.t(0).f_reflection_pad2d(a.ints(1).unwrap()))),
    ("replication_pad1d", |a| one(a.t(0).f_replication_pad1d(a.ints(1).unwrap()))),
    ("replication_pad2d", |a| one(a.t(0).f_replication_pad2d(a.ints(1).unwrap()))),
    ("replication_pad3d", |a| one(a.t(0).f_replication_pad3d(a.ints(1).unwrap()))),
];
