//! Selecting between two trees.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::loss_scale::{all_finite, select_tree};
use tch_amp::policy::PolicyError;

use crate::loss_scale::{NAN, of};
use testkit::bits::bits;
use testkit::{assert_refused, devices, for_each_device, to_f64};

const KINDS: [Kind; 12] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Bool,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
];

#[test]
fn tensors_of_all_dtypes_are_selected_bit_by_bit() {
    for_each_device(|device| {
        for kind in KINDS {
            let (new, old) = (of(&[1.0, 0.0], kind, device), of(&[0.0, 1.0], kind, device));
            for flag in [true, false] {
                let pred = Tensor::from(flag).to_device(device);
                let chosen = select_tree(&pred, &new, &old).unwrap();
                assert_eq!((chosen.kind(), chosen.size()), (kind, vec![2]));
                let want = if flag { &new } else { &old };
                let cpu = |x: &Tensor| bits(&x.to_device(Device::Cpu));
                assert_eq!(cpu(&chosen), cpu(want), "{kind:?}");
            }
        }
    });
}

#[test]
fn a_nan_that_is_not_selected_has_no_effect() {
    for_each_device(|device| {
        let (new, old) = (of(&[NAN], Kind::Float, device), of(&[3.0], Kind::Float, device));
        let chosen = select_tree(&all_finite(&new).unwrap(), &new, &old).unwrap();
        assert_eq!(to_f64(&chosen), [3.0]);
    });
}

#[test]
fn whole_trees_are_selected() {
    for_each_device(|device| {
        let tree = |x: f64| {
            let leaf = || of(&[x], Kind::Float, device);
            let count = of(&[x], Kind::Int64, device);
            (BTreeMap::from([("w".to_owned(), vec![leaf(), leaf()])]), Some(count), Tensor::new())
        };
        for (flag, want) in [(true, 5.0), (false, 4.0)] {
            let pred = Tensor::from_slice(&[flag]).to_device(device);
            let (w, count, undefined) = select_tree(&pred, &tree(5.0), &tree(4.0)).unwrap();
            assert_eq!([to_f64(&w["w"][0]), to_f64(&w["w"][1])], [[want], [want]]);
            assert_eq!((to_f64(&count.unwrap()), undefined.defined()), (vec![want], false));
        }
    });
}

#[test]
fn the_shape_does_not_depend_on_that_of_the_predicate() {
    let (new, old) = (Tensor::from(1f32), Tensor::from(2f32));
    for shape in [&[][..], &[1], &[1, 1]] {
        let pred = Tensor::from(1f32).reshape(shape);
        let chosen = select_tree(&pred, &new, &old).unwrap();
        assert_eq!((chosen.dim(), to_f64(&chosen)), (0, vec![1.0]));
    }
}

#[test]
fn gradients_flow_to_the_selected_tree() {
    for_each_device(|device| {
        let new = of(&[1.0], Kind::Float, device).set_requires_grad(true);
        let old = of(&[2.0], Kind::Float, device).set_requires_grad(true);
        let pred = Tensor::from(false).to_device(device);
        (select_tree(&pred, &new, &old).unwrap() * 3.0).sum(Kind::Float).backward();
        assert_eq!((to_f64(&new.grad()), to_f64(&old.grad())), (vec![0.0], vec![3.0]));
    });
}

#[test]
fn a_predicate_of_several_elements_is_refused() {
    let x = Tensor::from(1f32);
    for (pred, count) in [(Tensor::from_slice(&[true, false]), 2.0), (Tensor::new(), 0.0)] {
        let error = select_tree(&pred, &x, &x).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { name: "the number of elements of pred", .. }),
            "{error}"
        );
        assert!(error.to_string().contains(&format!(" is {count}, ")), "{error}");
    }
}

#[test]
fn trees_of_different_dtypes_are_refused_with_advice() {
    let of = |kind| vec![Tensor::from(1f32).to_kind(kind)];
    let error = select_tree(&Tensor::from(true), &of(Kind::Float), &of(Kind::Half)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the trees differ at `root[0]`: Float [] on Cpu in the first and Half [] on Cpu in the second; cast one of them, for instance with Policy::cast_to_param"
    );
    let (long, short) = (Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[1f32]));
    let error = select_tree(&Tensor::from(true), &long, &short).unwrap_err().to_string();
    assert!(
        error.ends_with("Float [1] on Cpu in the second"),
        "the error should not suggest a cast: {error}"
    );
}

#[test]
fn each_tensor_is_selected_on_its_device() {
    let devices = devices();
    let tree = |x: f64| {
        let tree = devices.iter().map(|device| of(&[x], Kind::Float, *device));
        tree.collect::<Vec<_>>()
    };
    for home in &devices {
        let chosen =
            select_tree(&Tensor::from(true).to_device(*home), &tree(1.0), &tree(2.0)).unwrap();
        assert_eq!(chosen.iter().map(Tensor::device).collect::<Vec<_>>(), devices);
        assert!(chosen.iter().all(|tensor| to_f64(tensor) == [1.0]), "{home:?}");
    }
    for other in &tree(1.0)[1..] {
        assert_refused!(
            select_tree(&Tensor::from(true), &tree(1.0)[0], other),
            Error::Policy(PolicyError::TreeMismatch { .. })
        );
    }
}
