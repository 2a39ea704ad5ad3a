//! The numbers that a recording counts, beside plain loops.

use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::insight::explain_planted;

/// Numbers that are 1, -1 or 0, and ones and zeros: their quotients are finite, infinite and NaN.
fn operands(elements: i64, kind: Kind) -> [Tensor; 2] {
    let a = Tensor::randint(3, [elements], (Kind::Int64, Device::Cpu)) - 1;
    let b = Tensor::randint(2, [elements], (Kind::Int64, Device::Cpu));
    [a, b].map(|tensor| tensor.to_kind(kind))
}

#[rstest]
fn numbers_are_counted_as_by_a_loop(
    #[values(Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16)] kind: Kind,
) {
    for elements in [1000, 16384, 40003] {
        let [a, b] = operands(elements, kind);
        let culprit = explain_planted(|x| x * (&a / &b).sum(Kind::Float)).culprit.unwrap();
        assert_eq!(culprit.operator, "aten::div");
        let (mut positive, mut negative, mut nan) = (0, 0, 0);
        let [a, b] = [a, b].map(|tensor| Vec::<f64>::try_from(tensor).unwrap());
        for (a, b) in a.iter().zip(&b) {
            let quotient = a / b;
            positive += i64::from(quotient == f64::INFINITY);
            negative += i64::from(quotient == f64::NEG_INFINITY);
            nan += i64::from(quotient.is_nan());
        }
        let values = culprit.values;
        let counted = (values.positive_infinite, values.negative_infinite, values.nan);
        assert_eq!(counted, (positive, negative, nan), "{kind:?}, {elements} elements");
        assert_eq!(values.elements, elements);
    }
}

#[rstest]
fn the_largest_finite_number_beside_a_mask_is_found(
    #[values(Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16)] kind: Kind,
) {
    let numbers = Tensor::randn([40003], (Kind::Float, Device::Cpu)).to_kind(kind);
    let mask = numbers.gt(1.0);
    let largest = numbers.masked_fill(&mask, 0).abs().max().double_value(&[]);
    let masked = numbers.masked_fill(&mask, f64::NEG_INFINITY);
    let planted = |x: &Tensor| x * (&masked - masked.view_as(&masked)).sum(Kind::Float);
    let culprit = explain_planted(planted).culprit.unwrap();
    assert_eq!(culprit.operator, "aten::sub");
    assert_eq!(culprit.largest_inputs, [largest, largest]);
}
