//! Convolutions, all of which are on the lower-precision list.

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one};

/// Stride, padding, dilation and groups of a convolution over `n` dimensions.
fn geometry(a: &Args, n: usize) -> (Vec<i64>, Vec<i64>, Vec<i64>, i64) {
    (a.each(3, 1, n), a.each(4, 0, n), a.each(5, 1, n), a.int(6).unwrap_or(1))
}

/// Stride, dilation and groups of a convolution whose padding is given by name.
fn padded(a: &Args) -> (Vec<i64>, Vec<i64>, i64) {
    (a.ints(3).unwrap(), a.ints(5).unwrap(), a.int(6).unwrap())
}

/// Stride, padding, output padding, groups and dilation of a transposed convolution over `n` dimensions.
fn transposed(a: &Args, n: usize) -> (Vec<i64>, Vec<i64>, Vec<i64>, i64, Vec<i64>) {
    let (groups, dilation) = (a.int(6).unwrap_or(1), a.each(7, 1, n));
    (a.each(3, 1, n), a.each(4, 0, n), a.each(5, 0, n), groups, dilation)
}

fn convolution(a: &Args) -> Outputs {
    let [stride, padding, dilation] = [3, 4, 5].map(|i| a.ints(i).unwrap());
    let (output_padding, groups) = (a.ints(7).unwrap(), a.int(8).unwrap());
    let transposed = a.flag(6).unwrap();
    let (input, weight, bias) = (a.t(0), a.t(1), a.opt(2));
    let flag = |place: usize| a.flag(place).unwrap();
    // The number of arguments selects the overload; without further arguments it is the public op.
    one(match a.count() {
        9 => input.f_convolution(
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
        ),
        12 => input.f_internal_convolution_deprecated(
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            flag(9),
            flag(10),
            flag(11),
        ),
        _ => input.f_internal_convolution(
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            flag(9),
            flag(10),
            flag(11),
            flag(12),
        ),
    })
}

fn cudnn_convolution(a: &Args) -> Outputs {
    let [padding, stride, dilation] = [2, 3, 4].map(|i| a.ints(i).unwrap());
    let [benchmark, deterministic, tf32] = [6, 7, 8].map(|i| a.flag(i).unwrap());
    let groups = a.int(5).unwrap();
    let (x, w) = (a.t(0), a.t(1));
    one(x.f_cudnn_convolution(w, padding, stride, dilation, groups, benchmark, deterministic, tf32))
}

fn cudnn_convolution_transpose(a: &Args) -> Outputs {
    let [padding, output_padding, stride, dilation] = [2, 3, 4, 5].map(|i| a.ints(i).unwrap());
    let [benchmark, deterministic, tf32] = [7, 8, 9].map(|i| a.flag(i).unwrap());
    let groups = a.int(6).unwrap();
    one(a.t(0).f_cudnn_convolution_transpose(
        a.t(1),
        padding,
        output_padding,
        stride,
        dilation,
        groups,
        benchmark,
        deterministic,
        tf32,
    ))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("_convolution", convolution),
    ("conv1d", |a| {
        let (stride, padding, dilation, groups) = geometry(a, 1);
        one(a.t(0).f_conv1d(a.t(1), a.opt(2), stride, padding, dilation, groups))
    }),
    ("conv1d.padding", |a| {
        let (stride, dilation, groups) = padded(a);
        one(a.t(0).f_conv1d_padding(a.t(1), a.opt(2), stride, a.text(4), dilation, groups))
    }),
    ("conv2d.padding", |a| {
        let (stride, dilation, groups) = padded(a);
        one(a.t(0).f_conv2d_padding(a.t(1), a.opt(2), stride, a.text(4), dilation, groups))
    }),
    ("conv2d", |a| {
        let (stride, padding, dilation, groups) = geometry(a, 2);
        one(a.t(0).f_conv2d(a.t(1), a.opt(2), stride, padding, dilation, groups))
    }),
    ("conv3d.padding", |a| {
        let (stride, dilation, groups) = padded(a);
        one(a.t(0).f_conv3d_padding(a.t(1), a.opt(2), stride, a.text(4), dilation, groups))
    }),
    ("conv3d", |a| {
        let (stride, padding, dilation, groups) = geometry(a, 3);
        one(a.t(0).f_conv3d(a.t(1), a.opt(2), stride, padding, dilation, groups))
    }),
    ("conv_tbc", |a| one(a.t(0).f_conv_tbc(a.t(1), a.t(2), a.int(3).unwrap_or(0)))),
    ("conv_transpose1d", |a| {
        let (stride, padding, output, groups, dilation) = transposed(a, 1);
        one(a.t(0).f_conv_transpose1d(a.t(1), a.opt(2), stride, padding, output, groups, dilation))
    }),
    ("conv_transpose2d", |a| {
        let (stride, padding, output, groups, dilation) = transposed(a, 2);
        one(a.t(0).f_conv_transpose2d(a.t(1), a.opt(2), stride, padding, output, groups, dilation))
    }),
    ("conv_transpose3d", |a| {
        let (stride, padding, output, groups, dilation) = transposed(a, 3);
        one(a.t(0).f_conv_transpose3d(a.t(1), a.opt(2), stride, padding, output, groups, dilation))
    }),
    ("convolution", convolution),
    ("cudnn_convolution", cudnn_convolution),
    ("cudnn_convolution_transpose", cudnn_convolution_transpose),
];
