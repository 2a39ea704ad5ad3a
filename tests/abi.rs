//! `csrc/border/shim.h` and `src/sys.rs` declare the same C ABI, and so do `csrc/insight/shim_insight.h` and
//! `src/sys/insight.rs`, and `csrc/distributed/shim_distributed.h` and `src/sys/distributed.rs`.
//!
//! bindgen (0.73) does not write these declarations: its types of callbacks are `Option`s, so that null could be passed
//! where the shim calls what it gets; constants have the type of C's `enum`, where most are `u8` as the fields and
//! arguments that they are for, and the others `usize` or signed; and a changed header would need libclang.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::ffi::CStr;
use std::path::{Path, PathBuf};

fn read(name: &str) -> String {
    std::fs::read_to_string(testkit::python::root().join(name)).expect("the source is readable")
}

/// The headers, one after the other, and the Rust files.
fn headers() -> String {
    let bodies = [
        "csrc/border/shim.h",
        "csrc/insight/shim_insight.h",
        "csrc/distributed/shim_distributed.h",
    ]
    .map(|name| {
        let text = flat(&read(name));
        text.split_once("extern \"C\" {").expect("the header opens extern C").1.to_owned()
    });
    bodies.concat()
}

fn declarations() -> String {
    ["src/sys.rs", "src/sys/insight.rs", "src/sys/distributed.rs"]
        .map(|name| flat(&read(name)))
        .concat()
}

/// The text on one line, without comments and preprocessor conditions.
fn flat(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim().starts_with('#'));
    let lines = lines.map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The Rust equivalent of a C type.
fn rust_type(c: &str) -> String {
    let c = c.trim();
    if let Some(inner) = c.strip_suffix("*const *") {
        return format!("*const {}", rust_type(&format!("{inner}*")));
    }
    if let Some(inner) = c.strip_suffix('*') {
        let inner = inner.trim().replace("void", "c_void");
        return match inner.strip_prefix("const ") {
            Some(inner) => format!("*const {}", rust_type(inner)),
            None => format!("*mut {}", rust_type(&inner)),
        };
    }
    let known = match c {
        "void" => "()",
        "c_void" => "c_void",
        "char" => "c_char",
        "uint8_t" => "u8",
        "int8_t" => "i8",
        "uint32_t" => "u32",
        "uint64_t" => "u64",
        "int64_t" => "i64",
        "uintptr_t" | "size_t" => "usize",
        "double" => "f64",
        "float" => "f32",
        ours => return rust_name(ours),
    };
    known.to_owned()
}

/// The name in Rust of a type of ours, such as `ScaleRule` for `tamp_scale_rule`.
fn rust_name(c: &str) -> String {
    let words = c.strip_prefix("tamp_").unwrap_or_else(|| panic!("unknown C type: {c:?}"));
    let words = words.split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
    words.collect()
}

/// Splits `type name` or `type *name`.
fn c_declaration(text: &str) -> (String, String) {
    let text = text.trim();
    let at = text.rfind([' ', '*']).expect("a type and a name") + 1;
    (text[at..].to_owned(), rust_type(&text[..at]))
}

/// `name(parameter: type, …) -> type` for every function of the header.
fn c_functions() -> Vec<String> {
    let body = headers();
    // Types of callbacks have a test of their own.
    let statements = body.split(';').filter(|statement| !statement.contains("(*"));
    let body = statements.collect::<Vec<_>>().join(";");
    let mut out = Vec::new();
    for part in body.split(") TAMP_NOEXCEPT;") {
        let Some((head, parameters)) = part.rsplit_once('(') else { continue };
        let start = head.rfind(['}', ';']).map_or(0, |at| at + 1);
        let (name, returned) = c_declaration(&head[start..]);
        out.push(format!("{name}({}) -> {returned}", c_parameters(parameters)));
    }
    out
}

fn c_parameters(text: &str) -> String {
    let parameters = text.split(',').filter(|text| text.trim() != "void");
    let parameters = parameters.map(c_declaration).map(|(name, kind)| format!("{name}: {kind}"));
    parameters.collect::<Vec<_>>().join(", ")
}

fn rust_functions() -> Vec<String> {
    let text = declarations();
    let mut out = Vec::new();
    for part in text.split("pub(crate) fn ").skip(1) {
        let declaration = part.split(';').next().expect("a declaration ends");
        let (name, rest) = declaration.split_once('(').expect("a function has parameters");
        out.push(format!("{}{}", name.trim(), rust_signature(rest)));
    }
    out
}

/// `(parameter: type, …) -> type` for what follows the opening parenthesis of a function in Rust.
fn rust_signature(rest: &str) -> String {
    let (parameters, returned) = rest.rsplit_once(')').expect("the parameters end");
    let returned = returned.trim().strip_prefix("-> ").unwrap_or("()");
    format!("({}) -> {returned}", parameters.trim().trim_end_matches(',').trim())
}

#[test]
fn functions_are_the_same_in_the_same_order() {
    let (c, rust) = (c_functions(), rust_functions());
    assert!(c.len() > 10, "the header was parsed incorrectly: {c:#?}");
    assert_eq!(c, rust);
}

/// `name(parameter: type, …) -> type` for every type of callback.
fn c_callbacks() -> Vec<String> {
    let text = headers();
    let mut out = Vec::new();
    for part in text.split("typedef ").filter_map(|part| part.split_once("(*")) {
        let (name, rest) = part.1.split_once(")(").expect("a callback has parameters");
        let parameters = rest.split(");").next().expect("the parameters end");
        out.push(format!(
            "{}({}) -> {}",
            rust_type(name),
            c_parameters(parameters),
            rust_type(part.0)
        ));
    }
    out
}

fn rust_callbacks() -> Vec<String> {
    let text = declarations();
    let mut out = Vec::new();
    for part in text.split("pub(crate) type ").skip(1) {
        let (name, rest) =
            part.split_once(" = unsafe extern \"C\" fn(").expect("a callback's type");
        let rest = rest.split(';').next().expect("a declaration ends");
        out.push(format!("{name}{}", rust_signature(rest)));
    }
    out
}

#[test]
fn callbacks_are_the_same_in_the_same_order() {
    let (c, rust) = (c_callbacks(), rust_callbacks());
    assert_eq!(c.len(), 5, "the header was parsed incorrectly: {c:#?}");
    assert_eq!(c, rust);
}

/// `name { field: type, … }` for every struct.
fn c_structs() -> Vec<String> {
    let text = headers();
    let mut out = Vec::new();
    for part in text.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once(" { ") else { continue };
        if name.contains(';') {
            continue; // an opaque struct
        }
        let fields = rest.split('}').next().expect("a struct ends");
        let fields = fields.split(';').filter(|field| !field.trim().is_empty()).map(|field| {
            let (field, length) = field.split_once('[').unwrap_or((field, ""));
            let (name, kind) = c_declaration(field);
            match length.trim_end_matches(']').trim_start_matches("TAMP_") {
                "" => format!("{name}: {kind}"),
                length => format!("{name}: [{kind}; {length}]"),
            }
        });
        let fields: Vec<_> = fields.collect();
        out.push(format!("{} {{ {} }}", rust_type(name), fields.join(", ")));
    }
    out
}

fn rust_structs() -> Vec<String> {
    let text = declarations().replace("pub(crate) ", "");
    let structs = text.split("struct ").skip(1).filter(|part| !part.contains("_opaque"));
    let structs = structs.map(|part| {
        let (name, rest) = part.split_once(" { ").expect("a struct has fields");
        let fields = rest.split('}').next().expect("a struct ends");
        format!("{name} {{ {} }}", fields.trim().trim_end_matches(','))
    });
    structs.collect()
}

#[test]
fn structs_have_the_same_fields_in_the_same_order() {
    let (c, rust) = (c_structs(), rust_structs());
    assert!(c.len() >= 4, "the header was parsed incorrectly: {c:#?}");
    assert_eq!(c, rust);
}

/// `NAME = value` for every constant. The length of an array is its value.
fn constants(text: &str, prefix: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for part in text.split([',', ';', '{', '}']) {
        let Some((name, value)) = part.split_once(" = ") else { continue };
        let name = name.trim().trim_start_matches("pub(crate) const ");
        let name = name.rsplit(' ').next_back().unwrap_or(name);
        let name = name.split(':').next().unwrap_or(name).trim_start_matches(prefix);
        if name.chars().all(|c| c.is_ascii_uppercase() || c == '_') {
            out.push((name.to_owned(), value.trim().to_owned()));
        }
    }
    out
}

#[test]
fn constants_have_the_same_values() {
    let c = constants(&headers(), "TAMP_");
    // Attributes are on lines of their own, which `flat` leaves out.
    let rust = declarations();
    let rust = constants(&rust, "");
    assert!(rust.len() >= 9, "sys.rs was parsed incorrectly: {rust:?}");
    assert_eq!(c, rust);
}

/// What csrc/graph/graph.cpp declares of libtorch_cuda's class of graphs, whose header a program need not have.
const OF_GRAPHS: [&CStr; 5] = [
    c"_ZN2at4cuda9CUDAGraphC1Eb",
    c"_ZN2at4cuda9CUDAGraphD1Ev",
    c"_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode",
    c"_ZN2at4cuda9CUDAGraph11capture_endEv",
    c"_ZN2at4cuda9CUDAGraph6replayEv",
];

#[test]
fn libtorch_cuda_has_the_class_of_graphs() {
    // Every libtorch_cuda has this function.
    if !testkit::simulation::is_defined(c"_ZN2at4cuda9warp_sizeEv") {
        testkit::skipped("the class of graphs is one of a CUDA libtorch");
        return;
    }
    for name in OF_GRAPHS {
        assert!(testkit::simulation::is_defined(name), "{}", name.to_string_lossy());
    }
    assert!(!testkit::simulation::is_defined(c"_ZN2at4cuda9CUDAGraph5otherEv"));
}

/// The definitions of the shim: the sources, one after the other, without comments.
fn definitions() -> String {
    let mut out = String::new();
    for folder in entries(&testkit::python::root().join("csrc")) {
        for path in entries(&folder) {
            if path.extension().is_some_and(|end| end == "cpp") {
                out += &flat(&std::fs::read_to_string(path).expect("the source is readable"));
                out.push(' ');
            }
        }
    }
    out
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder is readable");
    entries.map(|entry| entry.expect("the entry is readable").path())
}

/// The body of a function of the shim.
fn body_of<'a>(definitions: &'a str, name: &str) -> &'a str {
    let call = format!("{name}(");
    let starts = definitions.match_indices(&call).map(|(at, _)| &definitions[at..]);
    // A definition has a body after its parameters, unlike a call.
    let mut bodies = starts.filter_map(|text| {
        let (parameters, rest) = text.split_once(") noexcept {")?;
        (!parameters.contains([';', '{'])).then_some(rest)
    });
    let rest = bodies.next().unwrap_or_else(|| panic!("{name} has no definition"));
    let mut depth = 1;
    let end = rest.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0
    });
    &rest[..end.expect("the body ends")]
}

/// The functions whose body belongs to the program, and therefore runs in its regions.
const INSIDE_REGIONS: [&str; 9] = [
    "tamp_activation_linear", // whose products are those of the region, as of the other lean functions
    "tamp_autocast_clear_cache", // runs destructors
    "tamp_autocast_enter",
    "tamp_autocast_exit",
    "tamp_autocast_read",
    "tamp_backward", // runs backward passes, hooks and custom functions
    "tamp_grad",
    "tamp_linear_cross_entropy",
    "tamp_norm_linear",
];

/// The functions that cannot fail, because they call no operation on tensors.
const WITHOUT_OPERATIONS: [&str; 42] = [
    "tamp_allocations_end",
    "tamp_arrival_free",
    "tamp_autocast_after_backward",
    "tamp_autocast_backward",
    "tamp_cuda_is_linked",
    "tamp_emulation_end",
    "tamp_emulation_regions",
    "tamp_emulation_returned",
    "tamp_gathering_free",
    "tamp_gradients_release",
    "tamp_graph_free",
    "tamp_group_close",
    "tamp_group_free",
    "tamp_heap_keep",
    "tamp_libtorch_version",
    "tamp_memory_release",
    "tamp_name_end",
    "tamp_process_end_with",
    "tamp_recording_count",
    "tamp_recording_differs",
    "tamp_recording_free",
    "tamp_recording_saved_count",
    "tamp_reducer_free",
    "tamp_reference_free",
    "tamp_regions_leave",
    "tamp_regions_return",
    "tamp_saved_tensors_free",
    "tamp_saved_tensors_is_exact",
    "tamp_saved_tensors_leave",
    "tamp_signals_caught",
    "tamp_signals_release",
    "tamp_statistics_calls",
    "tamp_statistics_end",
    "tamp_store_free",
    "tamp_string_free",
    "tamp_string_new",
    "tamp_tensor_watch",
    "tamp_testing_as_other_device",
    "tamp_testing_engine",
    "tamp_testing_fail_at",
    "tamp_testing_fault",
    "tamp_testing_inference_mode",
];

#[test]
fn every_function_is_outside_of_the_programs_regions_or_says_why_not() {
    let definitions = definitions();
    let (mut without, mut inside) = (Vec::new(), Vec::new());
    for function in c_functions() {
        let name = function.split('(').next().expect("a function has a name");
        let body = body_of(&definitions, name);
        let is_inside = body.contains("guarded_inside_regions(err, ")
            || body.contains("const tamp::InsideRegions programs;");
        match (is_inside, body.contains("tamp::guarded(err, ")) {
            (true, false) => inside.push(name.to_owned()),
            (false, true) => {}
            _ => without.push(name.to_owned()),
        }
    }
    inside.sort();
    without.sort();
    assert_eq!(inside, INSIDE_REGIONS);
    assert_eq!(without, WITHOUT_OPERATIONS);
}

/// The functions that compute nothing that a region could change: they inspect, wait, record or communicate.
const COMPUTES_NOTHING: &[&str] = &[
    "tamp_allocations_count",
    "tamp_cuda_has_bf16",
    "tamp_cuda_initialize",
    "tamp_device_memory_read",
    "tamp_device_memory_reset",
    "tamp_emulation_begin",
    "tamp_emulation_mark",
    "tamp_gathering_begin",
    "tamp_gathering_finish",
    "tamp_graph_begin",
    "tamp_graph_end",
    "tamp_graph_enter",
    "tamp_graph_leave",
    "tamp_graph_new",
    "tamp_graph_replay",
    "tamp_graph_write",
    "tamp_group_all_gather",
    "tamp_group_all_reduce",
    "tamp_group_broadcast",
    "tamp_group_broadcast_all",
    "tamp_group_check_interface",
    "tamp_group_monitored_barrier",
    "tamp_group_new",
    "tamp_group_reduce_scatter",
    "tamp_group_unwritable",
    "tamp_jit_set_autocast_mode",
    "tamp_leaf_count_additions",
    "tamp_leaves",
    "tamp_matmul_precision",
    "tamp_name_begin",
    "tamp_overrides_add",
    "tamp_process_signal",
    "tamp_recording_event",
    "tamp_recording_memory",
    "tamp_recording_saved",
    "tamp_recording_saves",
    "tamp_reduced_precision_reduction",
    "tamp_reference_new",
    "tamp_saved_tensors_current",
    "tamp_saved_tensors_enter",
    "tamp_saved_tensors_new",
    "tamp_saved_tensors_prepare",
    "tamp_saved_tensors_recomputed",
    "tamp_signals_catch",
    "tamp_stamps_have_moved",
    "tamp_statistics_begin",
    "tamp_store_count",
    "tamp_store_get",
    "tamp_store_has",
    "tamp_store_in_process",
    "tamp_store_set",
    "tamp_store_tcp",
    "tamp_store_wait",
    "tamp_targets_check",
    "tamp_tensor_watched",
];

/// The source of each job of own arithmetic.
fn jobs() -> Vec<String> {
    let files = [
        "tests/regions/autocast/own_arithmetic.rs",
        "tests/processes/distributed/own_arithmetic.rs",
        "tests/reports/insight/own_arithmetic.rs",
    ];
    let split =
        |file| read(file).split("\n    job(").skip(1).map(str::to_owned).collect::<Vec<_>>();
    files.into_iter().flat_map(split).collect()
}

/// Functions of a list of parameters that leave the numbers of gradients alone, or give them new memory.
const CHANGES_NO_GRADIENT: &[&str] = &[
    "tamp_average_update",
    "tamp_gradients_narrow",
    "tamp_leaves",
    "tamp_recording_start",
    "tamp_stamps_have_moved",
];

#[test]
fn a_test_of_own_arithmetic_has_gradients_in_one_memory_for_every_function_of_parameters() {
    let shared = |job: &&String| {
        ["leaves(", "loss_of(", "sum_of(", "backward_of("].iter().any(|f| job.contains(f))
    };
    let jobs: Vec<_> = jobs();
    let jobs: Vec<_> = jobs.iter().filter(shared).collect();
    assert!(jobs.len() > 10, "the jobs are not found");
    let functions = c_functions();
    let of_parameters = functions.iter().filter(|function| function.contains("parameters"));
    let names: Vec<_> = of_parameters.filter_map(|function| function.split('(').next()).collect();
    assert!(names.contains(&"tamp_gradients_unscale"), "{names:?}");
    let known = |name: &str| {
        CHANGES_NO_GRADIENT.contains(&name)
            || jobs.iter().any(|job| job.contains(&format!("\"{name}\"")))
    };
    let unknown: Vec<_> = names.into_iter().filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "no job with gradients in one memory calls {unknown:#?}");
}

#[test]
fn a_test_of_own_arithmetic_calls_every_function_that_computes() {
    let jobs = jobs().concat();
    let known = |name: &str| {
        INSIDE_REGIONS.contains(&name)
            || WITHOUT_OPERATIONS.contains(&name)
            || COMPUTES_NOTHING.contains(&name)
            || jobs.contains(&format!("\"{name}\""))
    };
    let functions = c_functions();
    let names = functions.iter().filter_map(|function| function.split('(').next());
    let unknown: Vec<_> = names.filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "no job in own_arithmetic.rs calls {unknown:#?}");
}

/// The operations of tch that compute nothing, or views, or run code of the program.
const NOT_OWN: &[&str] = &[
    "f_as_strided",
    "f_backward",
    "f_chunk",
    "f_data",
    "f_detach",
    "f_empty",
    "f_expand_as",
    "f_forward",
    "f_forward_t",
    "f_from_slice",
    "f_get",
    "f_grad",
    "f_internal_values",
    "f_is_leaf",
    "f_kind",
    "f_narrow",
    "f_ones",
    "f_select",
    "f_set_data",
    "f_set_requires_grad",
    "f_unbind",
    "f_unsqueeze",
    "f_view",
    "f_view_as",
    "f_view_dtype",
    "f_zeros",
];

/// Functions whose callers, in the same file, are outside of the program's regions.
const CALLED_OUTSIDE: [(&str, &str); 6] = [
    ("src/distributed/sync_batch_norm.rs", "moments"),
    ("src/distributed/sync_batch_norm.rs", "sum"),
    ("src/dtype.rs", "beyond"),
    ("src/insight/audit/parts.rs", "get"),
    ("src/insight/audit/parts.rs", "number"),
    ("src/precision/mod.rs", "time"),
];

/// The names of the operations of tch that a text calls and that compute.
fn operations(text: &str) -> Vec<&str> {
    let calls = text.match_indices("f_").filter(|(at, _)| {
        let before = &text[..*at];
        before.ends_with('.') || before.ends_with("Tensor::")
    });
    let name = |(at, _): (usize, &str)| {
        let end = text[at..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        &text[at..at + end.unwrap_or(text.len() - at)]
    };
    calls.map(name).filter(|name| !NOT_OWN.contains(name)).collect()
}

/// The functions of a file with their texts, up to the next function.
fn rust_bodies(text: &str) -> Vec<(&str, &str)> {
    let starts: Vec<_> = text.match_indices(" fn ").map(|(at, _)| at + 4).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let body = |(start, end): (&usize, usize)| {
        let body = &text[*start..end];
        let name = body.split(['(', '<']).next().unwrap_or_default();
        (name, body)
    };
    starts.iter().zip(ends).map(body).collect()
}

fn rust_sources(folder: &str, out: &mut Vec<String>) {
    for entry in entries(&testkit::python::root().join(folder)) {
        let name = entry.file_name().expect("an entry has a name").to_string_lossy();
        let path = format!("{folder}/{name}");
        if entry.is_dir() {
            if name != "tests" {
                rust_sources(&path, out);
            }
        } else if path.ends_with(".rs") && !path.ends_with("/tests.rs") {
            out.push(path);
        }
    }
}

#[test]
fn every_operation_of_tch_is_outside_of_the_programs_regions() {
    let (mut paths, mut seen, mut wrong) = (Vec::new(), 0, Vec::new());
    rust_sources("src", &mut paths);
    for path in &paths {
        // Attributes are on lines of their own, which `flat` leaves out.
        let source = read(path);
        let text = flat(source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default());
        for (name, body) in rust_bodies(&text) {
            let computing = operations(body);
            seen += computing.len();
            let is_outside = body.contains("OutsideRegions::enter()")
                || CALLED_OUTSIDE.contains(&(path.as_str(), name));
            if !computing.is_empty() && !is_outside {
                wrong.push(format!("{path}: {name} calls {computing:?}"));
            }
        }
    }
    assert!(seen > 100, "only {seen} operations were found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
