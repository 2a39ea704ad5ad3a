//! Recurrent cells and layers.

use crate::autocast::operations::args::Args;
use crate::autocast::operations::table::{Entry, Outputs, four, one, three, two};

/// `has_biases`, `num_layers`, `dropout`, `train`, `bidirectional` and `batch_first` of a layer.
fn options(a: &Args) -> (bool, i64, f64, bool, bool, bool) {
    let flag = |place: usize| a.flag(place).unwrap();
    (flag(3), a.int(4).unwrap(), a.float(5).unwrap(), flag(6), flag(7), flag(8))
}

fn mkldnn_rnn_layer(a: &Args) -> Outputs {
    let [w0, w1, w2, w3, hx, cx] = [1, 2, 3, 4, 5, 6].map(|i: usize| a.t(i));
    let [mode, size, layers] = [9, 10, 11].map(|i: usize| a.int(i).unwrap());
    let flag = |place: usize| a.flag(place).unwrap();
    let (reverse, batches) = (flag(7), a.ints(8).unwrap());
    let (biases, bidirectional, batch_first, train) = (flag(12), flag(13), flag(14), flag(15));
    four(a.t(0).f_mkldnn_rnn_layer(
        w0,
        w1,
        w2,
        w3,
        hx,
        cx,
        reverse,
        batches,
        mode,
        size,
        layers,
        biases,
        bidirectional,
        batch_first,
        train,
    ))
}

/// The ops by name.
pub const OPS: &[Entry] = &[
    ("gru", |a| {
        let (biases, layers, dropout, train, both, batch) = options(a);
        two(a.t(0).f_gru(a.t(1), &a.ts(2), biases, layers, dropout, train, both, batch))
    }),
    ("gru_cell", |a| one(a.t(0).f_gru_cell(a.t(1), a.t(2), a.t(3), a.opt(4), a.opt(5)))),
    ("lstm", |a| {
        let (biases, layers, dropout, train, both, batch) = options(a);
        three(a.t(0).f_lstm(&a.ts(1), &a.ts(2), biases, layers, dropout, train, both, batch))
    }),
    ("lstm_cell", |a| two(a.t(0).f_lstm_cell(&a.ts(1), a.t(2), a.t(3), a.opt(4), a.opt(5)))),
    ("mkldnn_rnn_layer", mkldnn_rnn_layer),
    ("rnn_relu", |a| {
        let (biases, layers, dropout, train, both, batch) = options(a);
        two(a.t(0).f_rnn_relu(a.t(1), &a.ts(2), biases, layers, dropout, train, both, batch))
    }),
    ("rnn_relu_cell", |a| one(a.t(0).f_rnn_relu_cell(a.t(1), a.t(2), a.t(3), a.opt(4), a.opt(5)))),
    ("rnn_tanh", |a| {
        let (biases, layers, dropout, train, both, batch) = options(a);
        two(a.t(0).f_rnn_tanh(a.t(1), &a.ts(2), biases, layers, dropout, train, both, batch))
    }),
    ("rnn_tanh_cell", |a| one(a.t(0).f_rnn_tanh_cell(a.t(1), a.t(2), a.t(3), a.opt(4), a.opt(5)))),
];
