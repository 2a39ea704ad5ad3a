//! 16-bit numbers are copied into tensors and back bit by bit, with every version of tch.

use half::{bf16, f16};
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::half::{HalfElement, from_slice, to_vec};

use testkit::for_each_device;

#[test]
fn every_number_survives_the_round_trip_through_a_tensor() {
    round_trip(Kind::Half, f16::from_bits, f16::to_bits, f16::to_f32);
    round_trip(Kind::BFloat16, bf16::from_bits, bf16::to_bits, bf16::to_f32);
}

/// Of all 65536 numbers, including NaNs with all their payloads.
fn round_trip<T: HalfElement>(
    kind: Kind,
    from_bits: fn(u16) -> T,
    to_bits: fn(T) -> u16,
    to_f32: fn(T) -> f32,
) {
    let all: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
    for_each_device(|device| {
        let tensor = from_slice(&all).unwrap().to_device(device);
        assert_eq!((tensor.kind(), tensor.size()), (kind, vec![1 << 16]));
        assert!(to_vec::<T>(&tensor).unwrap().into_iter().map(to_bits).eq(0..=u16::MAX));
    });
    // libtorch's own conversion to f32, which is exact, yields the same numbers.
    let seen = Vec::<f32>::try_from(from_slice(&all).unwrap().to_kind(Kind::Float)).unwrap();
    let same = |(a, b): (f32, f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert!(seen.into_iter().zip(all.into_iter().map(to_f32)).all(same));
}

#[test]
fn any_layout_is_read_in_row_major_order() {
    let numbers: Vec<_> = (0..6).map(|n| bf16::from_f32(n as f32)).collect();
    let tensor = from_slice(&numbers).unwrap().view([2, 3]).transpose(0, 1);
    let expected = [0, 3, 1, 4, 2, 5].map(|n| bf16::from_f32(n as f32));
    assert_eq!(to_vec::<bf16>(&tensor).unwrap(), expected);
    assert_eq!(to_vec::<bf16>(&tensor.set_requires_grad(true)).unwrap(), expected);
    assert_eq!(to_vec::<bf16>(&tensor.get(1).get(1)).unwrap(), expected[3..4]);
    assert!(to_vec::<f16>(&from_slice::<f16>(&[]).unwrap().view([0, 3])).unwrap().is_empty());
}

/// libtorch keeps the sign of such views outside of their memory.
#[test]
fn a_negative_view_is_read_with_its_sign() {
    for_each_device(|device| {
        let numbers = [1f32, -2.0, 0.5];
        let short = from_slice(&numbers.map(f16::from_f32)).unwrap().to_device(device);
        let brain = from_slice(&numbers.map(bf16::from_f32)).unwrap().to_device(device);
        let want = numbers.map(|x| f16::from_f32(-x));
        assert_eq!(to_vec::<f16>(&short.internal_neg_view()).unwrap(), want);
        let want = numbers.map(|x| bf16::from_f32(-x));
        assert_eq!(to_vec::<bf16>(&brain.internal_neg_view()).unwrap(), want);
        // One complex number of two fp16.
        let pair = from_slice(&[1f32, 2.0].map(f16::from_f32)).unwrap().to_device(device);
        let imaginary = pair.view([1, 2]).view_as_complex().conj().imag();
        assert_eq!(to_vec::<f16>(&imaginary).unwrap(), [f16::from_f32(-2.0)]);
    });
}

#[test]
fn another_dtype_is_refused() {
    let tensor = Tensor::zeros([2], (Kind::Half, Device::Cpu));
    match to_vec::<bf16>(&tensor) {
        Err(Error::InvalidArgument { name: "the tensor", problem }) => {
            assert!(problem.starts_with("is Half, but must be BFloat16"), "{problem}");
        }
        other => panic!("{other:?}"),
    }
    let float = tensor.to_kind(Kind::Float);
    let error = to_vec::<f16>(&float).unwrap_err().to_string();
    assert_eq!(error, "the tensor is Float, but must be Half; convert it with to_kind(Half)");
}

/// The defect that these functions work around. If this test fails, tch was fixed: remove the warnings from the
/// documentation.
#[test]
fn tch_mistakes_bf16_for_fp16() {
    assert_eq!(Tensor::from_slice(&[bf16::from_f32(1.0)]).kind(), Kind::Half);
}
