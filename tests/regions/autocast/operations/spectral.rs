//! Fourier transforms.

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, one};

fn stft(a: &Args) -> Outputs {
    let (n, hop, length, window) = (a.int(1).unwrap(), a.int(2), a.int(3), a.opt(4));
    let [normalized, onesided, complex, aligned] = [5, 6, 7, 8].map(|i: usize| a.flag(i).unwrap());
    one(a.t(0).f_stft(n, hop, length, window, normalized, onesided, complex, aligned))
}

fn stft_center(a: &Args) -> Outputs {
    let (n, hop, length, window) = (a.int(1).unwrap(), a.int(2), a.int(3), a.opt(4));
    let [center, normalized, onesided, complex, aligned] =
        [5, 7, 8, 9, 10].map(|i: usize| a.flag(i).unwrap());
    let pad = a.text(6);
    one(a
        .t(0)
        .f_stft_center(n, hop, length, window, center, pad, normalized, onesided, complex, aligned))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("fft_fft", |a| one(a.t(0).f_fft_fft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_hfft", |a| one(a.t(0).f_fft_hfft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_ifft", |a| one(a.t(0).f_fft_ifft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_ihfft", |a| one(a.t(0).f_fft_ihfft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_irfft", |a| one(a.t(0).f_fft_irfft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_rfft", |a| one(a.t(0).f_fft_rfft(a.int(1), a.int(2).unwrap(), a.text(3)))),
    ("fft_fft2", |a| one(a.t(0).f_fft_fft2(a.ints(1), a.ints(2).unwrap(), a.text(3)))),
    ("fft_ifft2", |a| one(a.t(0).f_fft_ifft2(a.ints(1), a.ints(2).unwrap(), a.text(3)))),
    ("fft_irfft2", |a| one(a.t(0).f_fft_irfft2(a.ints(1), a.ints(2).unwrap(), a.text(3)))),
    ("fft_rfft2", |a| one(a.t(0).f_fft_rfft2(a.ints(1), a.ints(2).unwrap(), a.text(3)))),
    ("fft_fftn", |a| one(a.t(0).f_fft_fftn(a.ints(1), a.ints(2), a.text(3)))),
    ("fft_ifftn", |a| one(a.t(0).f_fft_ifftn(a.ints(1), a.ints(2), a.text(3)))),
    ("fft_irfftn", |a| one(a.t(0).f_fft_irfftn(a.ints(1), a.ints(2), a.text(3)))),
    ("fft_rfftn", |a| one(a.t(0).f_fft_rfftn(a.ints(1), a.ints(2), a.text(3)))),
    ("stft", stft),
    ("stft.center", stft_center),
];
