//! The trees that a policy casts, and how two trees differ.

use std::collections::{BTreeMap, HashMap};

use rstest::rstest;
use tch::{Kind, Tensor};
use tch_amp::loss_scale::select_tree;
use tch_amp::scaler::ScalerError;
use tch_amp::tree::Tree;
use tch_amp::{Error, Policy};

fn x() -> Tensor {
    Tensor::from_slice(&[1f32, 2.0])
}

/// The dtypes of a tree's tensors after a cast to bf16, in order.
fn kinds<T: Tree + ?Sized>(tree: &T) -> Vec<Kind>
where
    T::Output: Tree,
{
    let mut kinds = Vec::new();
    let cast = Policy::BF16.cast_to_param(tree).unwrap();
    cast.visit(&mut |tensor| kinds.push(tensor.kind()));
    kinds
}

#[test]
fn every_shape_of_tree_is_cast() {
    let half = |n| vec![Kind::BFloat16; n];
    let i = Tensor::from(1i64);
    assert_eq!(kinds(&x()), half(1));
    assert_eq!(kinds(&(&x(), &i)), [Kind::BFloat16, Kind::Int64]);
    assert_eq!(kinds(&((x(),), (x(), x(), (x(), x(), x(), x(), x(), x())))), half(9));
    assert_eq!(kinds([x(), x()].as_slice()), half(2));
    assert_eq!(kinds(&vec![[x(), x()], [x(), x()]]), half(4));
    assert_eq!(kinds(&(Some(x()), None::<Tensor>, Box::new(x()))), half(2));
    assert_eq!(
        kinds(&BTreeMap::from([("a".to_owned(), vec![x()]), ("b".to_owned(), vec![])])),
        half(1)
    );
    assert_eq!(kinds(&HashMap::from([("a", x()), ("b", x())])), half(2));
    assert_eq!(kinds(&()), half(0));
}

#[test]
fn the_structure_is_preserved() {
    let tree = HashMap::from([("w".to_owned(), (x(), Some([Tensor::from(3i64), x()])))]);
    let mut cast = Policy::F16.cast_to_param(&tree).unwrap();
    let (w, rest) = cast.remove("w").unwrap();
    let [count, b] = rest.unwrap();
    assert_eq!([w.kind(), count.kind(), b.kind()], [Kind::Half, Kind::Int64, Kind::Half]);
}

#[test]
fn the_first_error_of_a_map_is_returned() {
    let mut seen = 0;
    let error = vec![x(), x(), x()].try_map(&mut |_| {
        seen += 1;
        if seen == 2 { Err(Error::Scaler(ScalerError::EmptyState)) } else { Ok(x()) }
    });
    assert!(matches!(error, Err(Error::Scaler(ScalerError::EmptyState))));
    assert_eq!(seen, 2);
}

fn map(keys: &[&str]) -> BTreeMap<String, Tensor> {
    keys.iter().map(|&key| (key.to_owned(), x())).collect()
}

#[rstest]
#[case(differ(&vec![x()], &vec![x(), x()]), "root", "1 elements in the first and 2 in the second")]
#[case(differ(&(x(), Some(x())), &(x(), None)), "root.1", "Some in the first and None in the second")]
#[case(differ(&None, &Some(x())), "root", "None in the first and Some in the second")]
#[case(differ(&map(&["a", "b"]), &map(&["a"])), "root", "\"b\" is in the first only")]
#[case(differ(&map(&["a"]), &map(&["a", "b"])), "root", "\"b\" is in the second only")]
#[case(
    differ(&vec![(map(&["a"]), [x()])], &vec![(map(&["a"]), [x().to_kind(Kind::Half)])]),
    "root[0].1[0]",
    "Float [2] on Cpu in the first and Half [2] on Cpu in the second; cast one of them, for instance with Policy::cast_to_param"
)]
#[case(
    differ(&HashMap::from([("k".to_owned(), x())]), &HashMap::from([("k".to_owned(), x().unsqueeze(0))])),
    "root[\"k\"]",
    "Float [2] on Cpu in the first and Float [1, 2] on Cpu in the second"
)]
#[case(
    differ(&x(), &Tensor::new()),
    "root",
    "Float [2] on Cpu in the first and an undefined tensor in the second"
)]
fn trees_that_differ_are_refused(#[case] error: Error, #[case] place: &str, #[case] problem: &str) {
    assert_eq!(error.to_string(), format!("the trees differ at `{place}`: {problem}"));
}

#[rstest]
#[case(differ_in(|t| vec![(x(), t)]), "root[0].1")]
#[case(differ_in(|t| (x(), vec![x(), t])), "root.1[1]")]
#[case(differ_in(|t| [vec![x()], vec![x(), t]]), "root[1][1]")]
#[case(differ_in(|t| (x(), Some(Box::new((t, x()))))), "root.1.0")]
#[case(differ_in(|t| BTreeMap::from([("k".to_owned(), (x(), t))])), "root[\"k\"].1")]
#[case(differ_in(|t| (x(), vec![HashMap::from([("k", [x(), t])])])), "root.1[0][\"k\"][1]")]
fn the_place_of_a_difference_is_read_from_the_root(#[case] error: Error, #[case] place: &str) {
    let start = format!("the trees differ at `{place}`: ");
    assert!(error.to_string().starts_with(&start), "{error}");
}

/// Two trees that differ in the shape of one tensor.
fn differ_in<T: Tree>(tree: impl Fn(Tensor) -> T) -> Error {
    differ(&tree(x()), &tree(x().unsqueeze(0)))
}

fn differ<T: Tree>(new: &T, old: &T) -> Error {
    let result = select_tree(&Tensor::from(true), new, old);
    result.err().expect("the trees differ")
}
