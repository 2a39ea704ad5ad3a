//! Prints the tree of a file of PyTorch or safetensors: `cargo run --example torch-files FILE`.

use std::process::ExitCode;

use torch_files::{Result, TorchFile, Value};

/// How many items of a list of values are shown.
const ITEMS: usize = 8;

fn main() -> ExitCode {
    let paths: Vec<_> = std::env::args_os().skip(1).collect();
    if paths.is_empty() {
        eprintln!("usage: torch-files FILE...");
        return ExitCode::from(2);
    }
    for path in paths {
        if let Err(error) = print(path.as_ref()) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn print(path: &std::path::Path) -> Result<()> {
    let file = TorchFile::open(path)?;
    let tensors = file.tensors();
    let bytes: u64 = tensors.iter().map(|(_, tensor)| tensor.size_in_bytes()).sum();
    let (kind, count) = (file.kind(), tensors.len());
    println!("{}: {kind:?}, {count} tensors, {}", path.display(), size(bytes));
    for (name, text) in file.metadata() {
        println!("  metadata {}: {}", shown(name), shown(text));
    }
    tree(file.value(), 1);
    file.verify()
}

/// Prints what is in a container, a line for each item; a value alone is a line.
fn tree(value: &Value, depth: usize) {
    match value {
        Value::Dict(items) => items.iter().for_each(|(key, item)| {
            let key = key.key_text().map_or_else(|| "?".to_owned(), |key| shown(&key));
            branch(&key, item, depth);
        }),
        Value::List(items) | Value::Tuple(items) => {
            items.iter().enumerate().for_each(|(at, item)| branch(&at.to_string(), item, depth));
        }
        other => println!("{}{}", "  ".repeat(depth), line(other)),
    }
}

fn branch(name: &str, value: &Value, depth: usize) {
    println!("{}{name}: {}", "  ".repeat(depth), line(value));
    if is_branch(value) {
        tree(value, depth + 1);
    }
}

/// Returns whether a value has lines of its own: a list does not if it holds only numbers and texts.
fn is_branch(value: &Value) -> bool {
    let is_leaf = |item: &Value| {
        !matches!(item, Value::Dict(_) | Value::List(_) | Value::Tuple(_) | Value::Tensor(_))
    };
    match value {
        Value::Dict(items) => !items.is_empty(),
        Value::List(items) | Value::Tuple(items) => !items.iter().all(is_leaf),
        _ => false,
    }
}

fn line(value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        Value::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
        Value::Int(number) => number.to_string(),
        Value::Uint(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Text(text) => format!("\"{}\"", shown(text)),
        Value::Dict(items) => format!("dict of {}", items.len()),
        Value::List(items) | Value::Tuple(items) if is_branch(value) => {
            format!("list of {}", items.len())
        }
        Value::List(items) | Value::Tuple(items) => {
            let first: Vec<_> = items.iter().take(ITEMS).map(line).collect();
            match items.len().saturating_sub(ITEMS) {
                0 => format!("[{}]", first.join(", ")),
                more => format!("[{}, and {more} more]", first.join(", ")),
            }
        }
        Value::Tensor(tensor) => {
            let strides = match tensor.is_contiguous() {
                true => String::new(),
                false => format!(" strides {:?}", tensor.strides),
            };
            let (dtype, shape) = (tensor.dtype, &tensor.shape);
            format!("{dtype} {shape:?}{strides} {}", size(tensor.size_in_bytes()))
        }
        Value::Opaque(what) => format!("({})", shown(what)),
        _ => "?".to_owned(),
    }
}

/// A text from the file, which a terminal must not obey, and which may be very long.
fn shown(text: &str) -> String {
    let mut short = String::new();
    for char in text.chars().take(100) {
        match char {
            '"' | '\'' | '\\' => short.push(char),
            char => short.extend(char.escape_debug()),
        }
    }
    if text.chars().nth(100).is_some() { short + "…" } else { short }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}
