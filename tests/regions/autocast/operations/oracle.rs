//! The results of Python's torch: the cases with their arguments and results.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::Value;
use tch::Kind;

use crate::autocast::operations::args::{Args, tensor};
use testkit::bits::{bits, kind_named};
use testkit::python::Oracle;

/// The output of the script.
#[derive(Debug)]
pub struct Answers {
    pub torch: String,
    /// The ops, with overload, for which the dispatcher has a function under the key AutocastCPU.
    pub registered: Vec<String>,
    /// The same for AutocastCUDA.
    pub registered_on_cuda: Vec<String>,
    /// The list of each op on CUDA.
    pub cuda_lists: BTreeMap<String, String>,
    pub cases: Vec<Case>,
}

/// One op, called once.
#[derive(Debug)]
pub struct Case(Value);

/// The result of a call: dtype, shape and bits of each output, `None` for an undefined one.
pub type Output = Option<(Kind, Vec<i64>, Vec<u8>)>;

/// Dtype, shape and bits of a tensor. A byte tensor is uninitialized scratch memory, whose bits are ignored.
pub fn output(tensor: &tch::Tensor) -> Output {
    let written = |kind| {
        if kind == Kind::Uint8 { Vec::new() } else { bits(tensor) }
    };
    tensor.defined().then(|| (tensor.kind(), tensor.size(), written(tensor.kind())))
}

impl Case {
    pub fn op(&self) -> &str {
        self.text("op")
    }

    /// The list, the op and the dtype, for reports of failures.
    pub fn name(&self) -> String {
        format!("{} {} in {}", self.text("list"), self.op(), self.text("dtype"))
    }

    pub fn dtype(&self) -> Kind {
        kind_named(self.text("dtype"))
    }

    pub fn args(&self) -> Args {
        Args::new(&self.0["args"], &self.0["kwargs"])
    }

    /// The outputs, or the first line of the error.
    pub fn expected(&self) -> Result<Vec<Output>, String> {
        if self.0.get("error").is_some() {
            return Err(self.text("error").to_owned());
        }
        let values = self.0["outputs"].as_array().expect("a case has outputs or an error");
        let read = |value: &Value| output(&tensor(value));
        Ok(values.iter().map(|value| if value.is_null() { None } else { read(value) }).collect())
    }

    fn text(&self, field: &str) -> &str {
        self.0[field].as_str().expect("the oracle writes a string here")
    }
}

/// Runs the script once for all tests; `None` if no Python is set.
pub fn answers() -> Option<&'static Answers> {
    static ANSWERS: OnceLock<Option<Answers>> = OnceLock::new();
    ANSWERS.get_or_init(|| Some(read(&Oracle::find("autocast_ops.py")?.run(&[], "")))).as_ref()
}

/// What the script gives on the first GPU; `None` if Python has none, or is not set.
pub fn answers_on_gpu() -> Option<Answers> {
    let printed = Oracle::find("autocast_ops.py")?.run(&["--cuda"], "");
    (!printed.is_empty()).then(|| read(&printed))
}

fn read(printed: &str) -> Answers {
    let mut lines = printed.lines().map(|line| serde_json::from_str(line).expect("a line of JSON"));
    let first: Value = lines.next().expect("the oracle describes itself");
    let names = |value: &Value| {
        let names = value.as_array().expect("a list of ops").iter();
        names.map(|name| name.as_str().expect("a name").to_owned()).collect()
    };
    let lists = first["cuda"]["lists"].as_object().expect("a list for each op");
    let lists = lists.iter().map(|(op, list)| (op, list.as_str().expect("the name of a list")));
    Answers {
        torch: first["torch"].as_str().expect("a version").to_owned(),
        registered: names(&first["registered"]),
        registered_on_cuda: names(&first["cuda"]["registered"]),
        cuda_lists: lists.map(|(op, list)| (op.clone(), list.to_owned())).collect(),
        cases: lines.map(Case).collect(),
    }
}
