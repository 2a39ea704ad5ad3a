//! Checks whether numbers are finite.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::Policy;
use tch_amp::loss_scale::all_finite;

use crate::loss_scale::{INF, NAN, answer, of};
use testkit::rng::Rng;
use testkit::{devices, for_each_device, to_f64};

const NUMBERS: [Kind; 7] = [
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
];

/// Layouts for which libtorch does not use its fast paths.
fn layouts(x: &Tensor) -> Vec<Tensor> {
    let n = x.numel() as i64;
    let wide = x.unsqueeze(1).repeat([1, 2]);
    vec![x.shallow_clone(), wide.select(1, 0), x.expand([3, n], false), x.reshape([1, n]).tr()]
}

#[test]
fn one_non_finite_element_anywhere_is_found_in_every_dtype() {
    for_each_device(|device| {
        let mut rng = Rng::new(5);
        for kind in NUMBERS {
            for size in [1, 2, 33, 5000] {
                let values: Vec<f64> = (0..size).map(|_| rng.eighth()).collect();
                let fine = of(&values, kind, device);
                let mut broken = values;
                broken[rng.below(size)] = *rng.pick(&[INF, -INF, NAN]);
                let broken = of(&broken, kind, device);
                for x in layouts(&fine) {
                    assert!(answer(&all_finite(&x).unwrap()), "{kind:?} {size}");
                }
                for x in layouts(&broken) {
                    assert!(!answer(&all_finite(&x).unwrap()), "{kind:?} {size}");
                    assert!(!answer(&all_finite(&[&fine, &x, &fine]).unwrap()));
                }
            }
        }
    });
}

/// Compared with a plain loop over the same numbers, which include the largest of each dtype, whose squares overflow.
#[test]
fn random_trees_give_the_results_of_plain_loops() {
    for_each_device(|device| {
        let mut rng = Rng::new(11);
        for _ in 0..300 {
            let mut tree = Vec::new();
            for _ in 0..1 + rng.below(5) {
                let kind = *rng.pick(&NUMBERS[..4]);
                let largest = match kind {
                    Kind::Half => 65504.0,
                    Kind::Double => f64::MAX,
                    _ => 3e38,
                };
                let bad = rng.one_in(8);
                let value = |rng: &mut Rng| match rng.below(30) {
                    0 if bad => *rng.pick(&[INF, -INF, NAN]),
                    1 => largest,
                    _ => rng.eighth(),
                };
                let values: Vec<_> = (0..rng.below(40)).map(|_| value(&mut rng)).collect();
                tree.push(of(&values, kind, device));
            }
            let want = tree.iter().all(|x| to_f64(x).iter().all(|x| x.is_finite()));
            assert_eq!(answer(&all_finite(&tree).unwrap()), want);
        }
    });
}

#[test]
fn a_complex_number_is_finite_if_both_parts_are() {
    for_each_device(|device| {
        // The absolute value of (3e38, 3e38) is infinite in f32.
        let part = |x: f64| of(&[1.0, x], Kind::Float, device);
        for (re, im) in [(3e38, 3e38), (INF, 0.0), (0.0, NAN)] {
            let x = Tensor::complex(&part(re), &part(im));
            let want = re.is_finite() && im.is_finite();
            assert_eq!(answer(&all_finite(&x).unwrap()), want);
            assert_eq!(answer(&all_finite(&x.conj()).unwrap()), want);
        }
    });
}

#[rstest]
#[case(Kind::Float8e5m2, true)]
#[case(Kind::Float8e4m3fn, false)]
fn kinds_of_eight_bits_are_read(#[case] kind: Kind, #[case] has_infinity: bool) {
    assert!(answer(&all_finite(&of(&[1.0, 2.0], kind, Device::Cpu)).unwrap()));
    let bad = if has_infinity { INF } else { NAN };
    assert!(!answer(&all_finite(&of(&[1.0, bad], kind, Device::Cpu)).unwrap()));
}

#[test]
fn dtypes_without_infinities_are_ignored() {
    let tree = (of(&[1.0], Kind::Int64, Device::Cpu), of(&[1.0], Kind::Bool, Device::Cpu));
    assert!(answer(&all_finite(&(tree, Tensor::new(), None::<Tensor>)).unwrap()));
    assert!(answer(&all_finite(&()).unwrap()));
    assert!(answer(&all_finite(&of(&[], Kind::Float, Device::Cpu)).unwrap()));
}

#[test]
fn sparse_gradients_are_coalesced_first() {
    for_each_device(|device| {
        let sparse = |values: &[f64]| {
            let indices = Tensor::zeros([1, values.len() as i64], (Kind::Int64, device));
            let values = of(values, Kind::Half, device);
            Tensor::sparse_coo_tensor_indices_size(
                &indices,
                &values,
                [4],
                (Kind::Half, device),
                false,
            )
        };
        assert!(answer(&all_finite(&sparse(&[1.0, 2.0])).unwrap()));
        assert!(!answer(&all_finite(&sparse(&[1.0, INF])).unwrap()));
        assert!(!answer(&all_finite(&sparse(&[60000.0, 60000.0])).unwrap()));
    });
}

#[test]
fn the_result_is_on_the_first_device_and_nothing_is_changed() {
    for_each_device(|device| {
        let w = of(&[1.0, 2.0], Kind::Float, device).set_requires_grad(true);
        let y = w.square().sum(Kind::Float);
        let before = (to_f64(&w), w.requires_grad());
        let finite = all_finite(&[&w, &y]).unwrap();
        assert_eq!((finite.device(), finite.requires_grad()), (device, false));
        assert_eq!((to_f64(&w), w.requires_grad()), before);
        // Fails if a tensor that backward needs was changed in place.
        y.backward();
    });
    let devices = devices();
    for (first, second) in devices.iter().flat_map(|a| devices.iter().map(move |b| (*a, *b))) {
        let (finite, nan) = (of(&[1.0], Kind::Float, first), of(&[NAN], Kind::Float, second));
        let mixed = [all_finite(&(&finite, &nan)).unwrap(), all_finite(&(&nan, &finite)).unwrap()];
        assert_eq!(mixed.each_ref().map(Tensor::device), [first, second]);
        assert_eq!(mixed.each_ref().map(answer), [false, false], "{first:?}, {second:?}");
    }
}

#[test]
fn returned_and_stored_gradients_are_checked() {
    for_each_device(|device| {
        let w = of(&[1.0, 0.0], Kind::Float, device).set_requires_grad(true);
        let unused = of(&[1.0], Kind::Float, device).set_requires_grad(true);
        let loss = || w.sqrt().sum(Kind::Float);
        let gradients = Tensor::run_backward(&[loss()], &[&w], false, false);
        assert!(
            !answer(&all_finite(&gradients).unwrap()),
            "the derivative of the root is infinite at zero"
        );
        loss().backward();
        let gradients = [w.grad(), unused.grad()];
        assert!(!answer(&all_finite(&gradients).unwrap()));
        let cast = Policy::BF16.cast_to_compute(&gradients).unwrap();
        assert!(!answer(&all_finite(&cast).unwrap()) && !cast[1].defined());
    });
}

#[test]
fn an_autocast_region_does_not_change_the_result() {
    for_each_device(|device| {
        let x = of(&[1.0, 65504.0], Kind::Half, device).set_requires_grad(true);
        assert!(answer(&tch_amp::autocast(device, || all_finite(&layouts(&x))).unwrap().unwrap()));
    });
}
