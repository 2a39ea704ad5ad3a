//! Compares the crate's table of autocast's lists with PyTorch and libtorch, and the guide's page of them,
//! `docs/operations.md`, with the table.
//!
//! The table has the lists of every tested libtorch, and a run compares those of one. To write them into the table, and
//! the page from the table:
//!
//! ```text
//! TCH_AMP_BLESS=1 cargo xtask simulate cargo test --test regions autocast::operations::page
//! TCH_AMP_BLESS=1 cargo xtask simulate --tch 0.24 cargo test --test regions autocast::operations::page
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use tch::Kind;

use crate::autocast::operations::cuda::{self, List};
use crate::autocast::operations::oracle::{self, Answers, Case};
use testkit::{is_set, python};

const HOW: &str = "write it anew with `TCH_AMP_BLESS=1 cargo xtask simulate cargo test --test regions autocast::operations::page`, and \
    with `cargo xtask simulate --tch V` for each other version of tch";

const TABLE: &str = "src/insight/operators/autocast_lists/table.rs";
const PAGE: &str = "docs/operations.md";

/// The versions of libtorch that the table covers. On the page, an operation without one is on the list of all.
const VERSIONS: [&str; 2] = ["2.11", "2.13"];

/// What the table has for all of them.
const ALL: &str = "&ALL";

pub const HALF: &str = "LowerPrecision";
pub const F32: &str = "F32";
pub const F32_UNLESS_ASKED: &str = "F32UnlessAsked";
pub const WIDEST: &str = "Widest";
const REFUSED: &str = "Refused";

/// The lists, by their names in the table, with their headings on the page, in its order.
const HEADINGS: [(&str, &str); 5] = [
    (HALF, "In the dtype of the region"),
    (F32, "In f32"),
    (F32_UNLESS_ASKED, "In f32, unless the call asks for a dtype"),
    (WIDEST, "In the widest dtype of the inputs"),
    (REFUSED, "Refused"),
];

/// The two parts of the page.
const DEVICES: [&str; 2] = ["cpu", "cuda"];

/// Operations whose results on the CPU do not show their list, and their lists in libtorch's `autocast_mode.cpp`.
const NOT_SHOWN_ON_CPU: [(&str, &str); 3] = [
    // tch always names a driver, which only CUDA accepts.
    ("linalg_svd", F32),
    ("linalg_svdvals", F32),
    // tch does not bind it.
    ("multilabel_margin_loss_forward", F32),
];

/// Operations of CUDA without an entry in libtorch's header, and their lists in `autocast_mode.cpp`.
const NOT_SHOWN_ON_CUDA: [(&str, &str); 1] = [("_cudnn_rnn", HALF)];

/// A device, an operation and its list.
type Entry = (String, String, String);

/// The versions for which each entry holds.
type Table = BTreeMap<Entry, BTreeSet<String>>;

const LINE: usize = 120;

/// What is before the names in the table.
const NAMES: &str = "        ";

#[test]
fn the_table_has_the_lists_of_this_libtorch() {
    let Some(answers) = oracle::answers() else { return };
    let version = minor(&answers.torch);
    assert!(
        VERSIONS.contains(&version.as_str()),
        "the table does not cover libtorch {version}: add it to VERSIONS"
    );
    let text = file(TABLE);
    let mut table = read(&text);
    let lists = lists(answers);
    if is_set("TCH_AMP_BLESS") {
        table.values_mut().for_each(|on| on.retain(|other| *other != version));
        for entry in lists {
            table.entry(entry).or_default().insert(version.clone());
        }
        table.retain(|_, on| !on.is_empty());
        bless(TABLE, &write(&text, &table));
        bless(PAGE, &page(&file(PAGE), &table));
        return;
    }
    let listed: BTreeSet<_> = table
        .iter()
        .filter(|(_, on)| on.contains(&version))
        .map(|(entry, _)| entry.clone())
        .collect();
    let differences: Vec<_> = lists.symmetric_difference(&listed).collect();
    assert!(
        differences.is_empty(),
        "{TABLE} and libtorch {version} differ in {differences:?}: {HOW}"
    );
}

#[test]
fn the_page_is_written_from_the_table() {
    if is_set("TCH_AMP_BLESS") {
        return;
    }
    let (text, present) = (file(TABLE), file(PAGE));
    let table = read(&text);
    assert_eq!(text, write(&text, &table), "{TABLE} was edited by hand: {HOW}");
    assert_eq!(present, page(&present, &table), "{PAGE} was edited by hand: {HOW}");
}

fn file(path: &str) -> String {
    fs::read_to_string(python::root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The page.
pub fn text() -> String {
    file(PAGE)
}

/// The lists on which operations are in every version, by device and operation.
pub fn lists_of_all_versions() -> BTreeMap<(&'static str, String), String> {
    let on_all = |(entry, on): (Entry, BTreeSet<String>)| {
        let (device, op, list) = entry;
        let device = DEVICES.into_iter().find(|known| *known == device)?;
        (on.len() == VERSIONS.len()).then_some(((device, op), list))
    };
    read(&file(TABLE)).into_iter().filter_map(on_all).collect()
}

fn bless(path: &str, text: &str) {
    fs::write(python::root().join(path), text).unwrap_or_else(|e| panic!("{path}: {e}"));
}

/// `2.13` of `2.13.0+cu130`.
fn minor(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

/// The name of the operation without its overload.
fn name(op: &str) -> &str {
    op.split('.').next().unwrap_or(op)
}

/// The lists of the libtorch of this run.
fn lists(answers: &Answers) -> BTreeSet<Entry> {
    let on_cpu = answers.registered.iter().map(|op| ("cpu", op, on_cpu(answers, op)));
    let on_cuda = answers.registered_on_cuda.iter().map(|op| ("cuda", op, on_cuda(answers, op)));
    let mut found = BTreeMap::new();
    let entry = |(device, op, list): (&str, &String, &'static str)| {
        let name = name(op).to_owned();
        let other = found.insert((device.to_owned(), name.clone()), list);
        assert!(other.is_none_or(|other| other == list), "{name} is on two lists on {device}");
        (device.to_owned(), name, list.to_owned())
    };
    on_cpu.chain(on_cuda).map(entry).collect()
}

/// The list of an operation on the CPU, inferred from Python's results.
fn on_cpu(answers: &Answers, op: &str) -> &'static str {
    if let Some((_, list)) = NOT_SHOWN_ON_CPU.iter().find(|(name, _)| *name == op) {
        return list;
    }
    // Overloads are on the same list, and the cases of one may show more than those of another.
    let cases = answers.cases.iter().filter(|case| name(case.op()) == name(op));
    let shown: BTreeSet<_> = cases.filter_map(shows).collect();
    // Inputs of both dtypes give f32 on the f32 list, too.
    let list = [F32, HALF, WIDEST].into_iter().find(|list| shown.contains(list));
    list.unwrap_or_else(|| panic!("no case shows the list of {op}: add one to autocast_cases.py"))
}

/// How oneDNN's message begins where it cannot compute in a dtype.
const NO_PRIMITIVE: &str = "could not create a primitive";

/// The list that one case implies.
fn shows(case: &Case) -> Option<&'static str> {
    let args = case.args().tensors();
    let kinds: BTreeSet<_> = args
        .iter()
        .filter(|arg| arg.is_floating_point())
        .map(|arg| format!("{:?}", arg.kind()))
        .collect();
    let (f32, half) = (format!("{:?}", Kind::Float), format!("{:?}", case.dtype()));
    let outputs = match case.expected() {
        Ok(outputs) => outputs,
        // oneDNN has each primitive in f32. In half precision a CPU without instructions for it lacks some.
        Err(error) => {
            let was_cast = kinds == BTreeSet::from([f32]) && error.starts_with(NO_PRIMITIVE);
            return was_cast.then_some(HALF);
        }
    };
    let (first, ..) = outputs.into_iter().flatten().next()?;
    match (kinds.contains(&f32), kinds.contains(&half), kinds.len(), first == case.dtype()) {
        (true, false, 1, true) => Some(HALF),
        (false, true, 1, false) => Some(F32),
        (true, true, 2, false) => Some(WIDEST),
        _ => None,
    }
}

/// The list of an operation on CUDA, from libtorch's header.
fn on_cuda(answers: &Answers, op: &str) -> &'static str {
    if let Some((_, list)) = NOT_SHOWN_ON_CUDA.iter().find(|(name, _)| *name == op) {
        return list;
    }
    match cuda::list(answers, op).unwrap_or_else(|| panic!("{op} is on no list of CUDA")) {
        List::LowerPrecisionFp => HALF,
        List::Fp32 => F32,
        List::Fp32SetOptDtype | List::Fp32AppendDtype => F32_UNLESS_ASKED,
        List::Promote => WIDEST,
        List::Banned => REFUSED,
    }
}

fn begin(device: &str) -> String {
    format!("<!-- generated: {device} -->\n")
}

const END: &str = "<!-- end -->\n";

/// The text before, in and after the generated part of a device.
fn parts<'a>(text: &'a str, device: &str) -> [&'a str; 3] {
    let begin = begin(device);
    let start = text.find(&begin).expect("the page has a marker for the device") + begin.len();
    let end = start + text[start..].find(END).expect("the marker has an end");
    [&text[..start], &text[start..end], &text[end..]]
}

fn read(text: &str) -> Table {
    let mut table = Table::new();
    for list in text.split("    (\"").skip(1) {
        let (head, names) = list.split_once(", &[\n").expect("a list has names");
        let cells: Vec<&str> = head.splitn(3, ", ").collect();
        let [device, list, on] = cells[..] else { panic!("{TABLE} has the list {head}: {HOW}") };
        let is_on = |version: &&str| on == ALL || on.contains(version);
        let on: BTreeSet<_> = VERSIONS.into_iter().filter(is_on).map(str::to_owned).collect();
        for op in names.split('"').skip(1).step_by(2) {
            let entry = (device.trim_end_matches('"').to_owned(), op.to_owned(), list.to_owned());
            table.insert(entry, on.clone());
        }
    }
    table
}

/// The file of the table, with these entries.
fn write(text: &str, table: &Table) -> String {
    let (before, _) = text.split_once("&[\n").expect("the table has a beginning");
    let mut lists = String::new();
    for (device, (list, _)) in DEVICES.iter().flat_map(|device| HEADINGS.map(|list| (device, list)))
    {
        let mut names: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for ((on_device, op, on_list), on) in table {
            if on_device == device && on_list == list {
                names.entry(on).or_default().push(format!("\"{op}\""));
            }
        }
        for (on, names) in names {
            let on: Vec<_> = on.iter().map(|version| format!("\"{version}\"")).collect();
            let on = match on.len() == VERSIONS.len() {
                true => ALL.to_owned(),
                false => format!("&[{}]", on.join(", ")),
            };
            let names =
                wrapped(&names, LINE - NAMES.len() - 1).replace('\n', &format!("\n{NAMES}"));
            lists += &format!("    (\"{device}\", {list}, {on}, &[\n{NAMES}{names},\n    ]),\n");
        }
    }
    format!("{before}&[\n{lists}];\n")
}

/// The page, with the lists of the table.
fn page(text: &str, table: &Table) -> String {
    let mut text = text.to_owned();
    for device in DEVICES {
        let mut generated = String::new();
        for (list, heading) in HEADINGS {
            let of = |((on_device, op, on_list), on): (&Entry, &BTreeSet<String>)| {
                (on_device == device && on_list == list).then(|| word(op, on))
            };
            let words: Vec<_> = table.iter().filter_map(of).collect();
            if !words.is_empty() {
                generated += &format!("\n### {heading}\n\n{}\n", wrapped(&words, LINE));
            }
        }
        let [before, _, after] = parts(&text, device);
        text = format!("{before}{generated}\n{after}");
    }
    text
}

fn word(op: &str, on: &BTreeSet<String>) -> String {
    let versions = on.iter().map(String::as_str).collect::<Vec<_>>();
    if versions == VERSIONS {
        format!("`{op}`")
    } else {
        format!("`{op}` ({})", versions.join(", "))
    }
}

fn wrapped(words: &[String], most: usize) -> String {
    let mut lines = vec![String::new()];
    for (i, word) in words.iter().enumerate() {
        let word = if i + 1 == words.len() { word.clone() } else { format!("{word},") };
        let line = lines.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(&word);
        } else if line.len() + 1 + word.len() <= most {
            line.push(' ');
            line.push_str(&word);
        } else {
            lines.push(word);
        }
    }
    lines.join("\n")
}
