//! A call that asks for a dtype gives in a region what it gives outside.

use std::collections::BTreeSet;

use tch::{Kind, TchError, Tensor};
use tch_amp::Autocast;

use crate::autocast::operations::first_line;
use crate::autocast::operations::oracle::output;
use crate::autocast::operations::page::{self, F32_UNLESS_ASKED};
use testkit::for_each_device;

/// An operator, and a call of it that asks for a dtype.
type Call = (&'static str, fn(&Tensor, Kind) -> Result<Tensor, TchError>);

/// The operators that take a dtype, those of the lists first.
const CALLS: [Call; 16] = [
    ("softmax", |x, kind| x.f_softmax(-1, kind)),
    ("log_softmax", |x, kind| x.f_log_softmax(-1, kind)),
    ("sum", |x, kind| x.f_sum(kind)),
    ("sum", |x, kind| x.f_sum_dim_intlist(1, false, kind)),
    ("prod", |x, kind| x.f_prod(kind)),
    ("prod", |x, kind| x.f_prod_dim_int(1, false, kind)),
    ("cumsum", |x, kind| x.f_cumsum(1, kind)),
    ("cumprod", |x, kind| x.f_cumprod(1, kind)),
    ("norm", |x, kind| x.f_norm_scalaropt_dtype(2.0, kind)),
    ("norm", |x, kind| x.f_norm_scalaropt_dim_dtype(2.0, 1, false, kind)),
    ("linalg_vector_norm", |x, kind| x.f_linalg_norm(2.0, 1, false, kind)),
    ("linalg_matrix_norm", |x, kind| x.f_linalg_norm_ord_str("fro", &[0, 1][..], false, kind)),
    ("mean", |x, kind| x.f_mean(kind)),
    ("mean", |x, kind| x.f_mean_dim(1, false, kind)),
    ("nansum", |x, kind| x.f_nansum(1, false, kind)),
    ("nanmean", |x, kind| x.f_nanmean(1, false, kind)),
];

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

#[test]
fn a_dtype_that_a_call_asks_for_is_that_of_its_result() {
    // Sums are split between threads.
    tch::set_num_threads(1);
    let numbers = Tensor::from_slice(&[0.3f32, -1.7, 0.9, 2.1, -0.4, 1.3]).view([2, 3]);
    for_each_device(|device| {
        for (name, call) in CALLS {
            for [given, asked, region] in KINDS.into_iter().flat_map(combinations) {
                // libtorch refuses it, and tch panics for an error of a call with a number.
                if name.contains("norm") && narrows(given, asked) {
                    continue;
                }
                let x = numbers.to_kind(given).to_device(device);
                let told = |result: Result<Tensor, TchError>| {
                    result.map(|tensor| output(&tensor)).map_err(first_line)
                };
                let inside = Autocast::new(device).dtype(region).run(|| call(&x, asked)).unwrap();
                let inside = told(inside);
                let what = format!("{name} of {given:?} in {asked:?}, in a region in {region:?}");
                assert_eq!(inside, told(call(&x, asked)), "{what}");
                let kind = inside.map(|output| output.map(|(kind, ..)| kind));
                assert!(kind.is_err() || kind == Ok(Some(asked)), "{what}");
            }
        }
    });
}

/// Whether numbers of a dtype may lose digits in another.
fn narrows(given: Kind, asked: Kind) -> bool {
    let widens = asked == Kind::Double || (asked == Kind::Float && given != Kind::Double);
    given != asked && !widens
}

/// The dtype of the input with that which the call asks for, and that of the region.
fn combinations(given: Kind) -> impl Iterator<Item = [Kind; 3]> {
    let asked = KINDS.into_iter();
    asked.flat_map(move |asked| [Kind::Half, Kind::BFloat16].map(|region| [given, asked, region]))
}

#[test]
fn every_operator_that_a_list_leaves_its_dtype_is_called() {
    let called: BTreeSet<_> = CALLS.iter().map(|(name, _)| *name).collect();
    for ((_, operator), list) in page::lists_of_all_versions() {
        assert!(list != F32_UNLESS_ASKED || called.contains(operator.as_str()), "{operator}");
    }
}
