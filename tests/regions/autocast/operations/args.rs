//! The arguments of a case, read from the oracle's JSON.

use serde_json::Value;
use tch::{Kind, Reduction, Tensor};

use testkit::bits::{from_hex, kind_named};

/// One argument.
#[derive(Debug)]
pub enum Arg {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tensor(Tensor),
    List(Vec<Arg>),
}

impl Arg {
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Arg::None => None,
            Arg::Tensor(tensor) => Some(tensor),
            other => panic!("{other:?} is not a tensor"),
        }
    }

    fn each_tensor(&self, f: &mut impl FnMut(&Tensor)) {
        match self {
            Arg::Tensor(tensor) => f(tensor),
            Arg::List(items) => items.iter().for_each(|item| item.each_tensor(f)),
            _ => {}
        }
    }

    fn replace(&mut self, f: &impl Fn(&Tensor) -> Tensor) {
        match self {
            Arg::Tensor(tensor) => *tensor = f(tensor),
            Arg::List(items) => items.iter_mut().for_each(|item| item.replace(f)),
            _ => {}
        }
    }
}

/// Reads a tensor that the oracle wrote.
pub fn tensor(value: &Value) -> Tensor {
    let shape: Vec<i64> = list(&value["shape"]).iter().map(int).collect();
    let bytes = from_hex(text(&value["bits"]));
    Tensor::from_data_size(&bytes, &shape, kind_named(text(&value["kind"])))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("the oracle writes a list here")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("the oracle writes a string here")
}

fn int(value: &Value) -> i64 {
    value.as_i64().expect("the oracle writes an integer here")
}

fn float(hex: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(hex, 16).expect("the oracle writes a float as its bits"))
}

fn read(value: &Value) -> Arg {
    match value {
        Value::Null => Arg::None,
        Value::Bool(flag) => Arg::Bool(*flag),
        Value::Number(_) => Arg::Int(int(value)),
        Value::String(text) => Arg::Text(text.clone()),
        Value::Array(items) => Arg::List(items.iter().map(read).collect()),
        Value::Object(fields) => match fields.get("float") {
            Some(bits) => Arg::Float(float(text(bits))),
            None => Arg::Tensor(tensor(value)),
        },
    }
}

/// The place of an argument: a position, a name, or either.
pub trait Place {
    fn find<'a>(&self, args: &'a Args) -> Option<&'a Arg>;
}

impl Place for usize {
    fn find<'a>(&self, args: &'a Args) -> Option<&'a Arg> {
        args.positional.get(*self)
    }
}

impl Place for &str {
    fn find<'a>(&self, args: &'a Args) -> Option<&'a Arg> {
        args.named.iter().find(|(name, _)| name == self).map(|(_, arg)| arg)
    }
}

impl Place for (usize, &str) {
    fn find<'a>(&self, args: &'a Args) -> Option<&'a Arg> {
        self.0.find(args).or_else(|| Place::find(&self.1, args))
    }
}

/// All arguments of a case. A missing argument is treated as `None`, and stands for PyTorch's default.
///
/// An argument whose type differs from what the table expects is a mistake in the table, and panics.
#[derive(Debug)]
pub struct Args {
    positional: Vec<Arg>,
    named: Vec<(String, Arg)>,
    kind: Option<Kind>,
}

impl Args {
    pub fn new(positional: &Value, named: &Value) -> Self {
        let named = named.as_object().expect("the oracle writes keyword arguments as an object");
        Self {
            positional: list(positional).iter().map(read).collect(),
            named: named.iter().map(|(name, value)| (name.clone(), read(value))).collect(),
            kind: None,
        }
    }

    /// All tensors, in order.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        let args = self.positional.iter().chain(self.named.iter().map(|(_, arg)| arg));
        args.for_each(|arg| arg.each_tensor(&mut |tensor| tensors.push(tensor.shallow_clone())));
        tensors
    }

    /// The arguments with each tensor replaced by its image.
    pub fn map(mut self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        let args = self.positional.iter_mut().chain(self.named.iter_mut().map(|(_, arg)| arg));
        args.for_each(|arg| arg.replace(&f));
        self
    }

    /// The arguments of the same call with a dtype, if the op takes one.
    pub fn in_kind(self, kind: Kind) -> Self {
        Self { kind: Some(kind), ..self }
    }

    /// The requested dtype. Without one, an op returns the dtype in which it computes.
    pub fn kind(&self) -> Option<Kind> {
        self.kind
    }

    pub fn count(&self) -> usize {
        self.positional.len() + self.named.len()
    }

    fn get(&self, place: impl Place) -> &Arg {
        place.find(self).unwrap_or(&Arg::None)
    }

    pub fn t(&self, place: impl Place) -> &Tensor {
        self.opt(place).expect("a tensor")
    }

    pub fn opt(&self, place: impl Place) -> Option<&Tensor> {
        self.get(place).tensor()
    }

    pub fn is_tensor(&self, place: impl Place) -> bool {
        matches!(self.get(place), Arg::Tensor(_))
    }

    pub fn ts(&self, place: impl Place) -> Vec<&Tensor> {
        let Arg::List(items) = self.get(place) else { panic!("not a list of tensors") };
        items.iter().map(|item| item.tensor().expect("a tensor")).collect()
    }

    pub fn int(&self, place: impl Place) -> Option<i64> {
        match self.get(place) {
            Arg::None => None,
            Arg::Int(value) => Some(*value),
            other => panic!("{other:?} is not an integer"),
        }
    }

    pub fn float(&self, place: impl Place) -> Option<f64> {
        match self.get(place) {
            Arg::None => None,
            Arg::Float(value) => Some(*value),
            Arg::Int(value) => Some(*value as f64),
            other => panic!("{other:?} is not a number"),
        }
    }

    pub fn flag(&self, place: impl Place) -> Option<bool> {
        match self.get(place) {
            Arg::None => None,
            Arg::Bool(value) => Some(*value),
            other => panic!("{other:?} is not a flag"),
        }
    }

    pub fn text(&self, place: impl Place) -> &str {
        match self.get(place) {
            Arg::Text(text) => text,
            other => panic!("{other:?} is not a text"),
        }
    }

    pub fn ints(&self, place: impl Place) -> Option<Vec<i64>> {
        let int = |item: &Arg| match item {
            Arg::Int(value) => *value,
            other => panic!("{other:?} is not an integer"),
        };
        match self.get(place) {
            Arg::None => None,
            Arg::List(items) => Some(items.iter().map(int).collect()),
            other => panic!("{other:?} is not a list of integers"),
        }
    }

    /// The integers at `place`, or `default` once for each of `n` dimensions.
    pub fn each(&self, place: impl Place, default: i64, n: usize) -> Vec<i64> {
        self.ints(place).unwrap_or_else(|| vec![default; n])
    }

    /// A reduction, by default none: the lists call the bindings below `torch.nn.functional`, which read the name of
    /// C++'s default as the number 0.
    pub fn reduction(&self, place: impl Place) -> Reduction {
        self.int(place).map_or(Reduction::None, Reduction::Other)
    }
}
