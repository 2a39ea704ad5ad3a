//! `csrc/shim.h` and `src/sys.rs` declare the same C ABI, and so do `csrc/shim_training.h` and
//! `src/sys/training.rs`, and `csrc/distributed/shim_distributed.h` and `src/sys/distributed.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

fn read(name: &str) -> String {
    std::fs::read_to_string(common::python::root().join(name)).expect("the source is readable")
}

/// The headers, one after the other, and the Rust files.
fn headers() -> String {
    let bodies = [
        "csrc/shim.h",
        "csrc/shim_training.h",
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
    ["src/sys.rs", "src/sys/training.rs", "src/sys/insight.rs", "src/sys/distributed.rs"]
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
        return match inner.trim().strip_prefix("const ") {
            Some(inner) => format!("*const *const {}", rust_type(inner)),
            None => format!("*const *mut {}", rust_type(inner)),
        };
    }
    if let Some(inner) = c.strip_suffix('*') {
        let inner = inner.trim().replace("void", "c_void");
        let inner = inner.as_str();
        return match inner.strip_prefix("const ") {
            Some(inner) => format!("*const {}", rust_type(inner)),
            None => format!("*mut {}", rust_type(inner)),
        };
    }
    let known = [
        ("void", "()"),
        ("c_void", "c_void"),
        ("char", "c_char"),
        ("uint8_t", "u8"),
        ("int8_t", "i8"),
        ("uint32_t", "u32"),
        ("uint64_t", "u64"),
        ("int64_t", "i64"),
        ("uintptr_t", "usize"),
        ("size_t", "usize"),
        ("double", "f64"),
        ("tamp_tensor", "Tensor"),
        ("tamp_gradient", "Gradient"),
        ("tamp_scale_rule", "ScaleRule"),
        ("tamp_scale_update", "ScaleUpdate"),
        ("tamp_autocast_state", "AutocastState"),
        ("tamp_autocast_device", "AutocastDevice"),
        ("tamp_autocast_settle", "AutocastSettle"),
        ("tamp_arrival", "Arrival"),
        ("tamp_optim_options", "OptimOptions"),
        ("tamp_optim_parameter", "OptimParameter"),
        ("tamp_optim_scale", "OptimScale"),
        ("tamp_stamp", "Stamp"),
        ("tamp_node", "Node"),
        ("tamp_tensors", "Tensors"),
        ("tamp_function", "Function"),
        ("tamp_function_backward", "FunctionBackward"),
        ("tamp_function_call", "FunctionCall"),
        ("tamp_function_take", "FunctionTake"),
        ("tamp_function_free", "FunctionFree"),
        ("tamp_function_input", "FunctionInput"),
        ("tamp_average_options", "AverageOptions"),
        ("tamp_spike_options", "SpikeOptions"),
        ("tamp_device_memory", "DeviceMemory"),
        ("tamp_counted_gradient", "CountedGradient"),
        ("tamp_recording", "Recording"),
        ("tamp_recorded_tensor", "RecordedTensor"),
        ("tamp_recorded_event", "RecordedEvent"),
        ("tamp_reference", "Reference"),
        ("tamp_name", "Name"),
        ("tamp_store", "Store"),
        ("tamp_gathering", "Gathering"),
        ("tamp_group", "Group"),
        ("tamp_group_options", "GroupOptions"),
        ("tamp_reducer", "Reducer"),
        ("tamp_reducer_options", "ReducerOptions"),
    ];
    let found = known.iter().find(|(name, _)| *name == c);
    found.unwrap_or_else(|| panic!("unknown C type: {c:?}")).1.to_owned()
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
        let Some((head, parameters)) = part.rsplit_once('(') else {
            continue;
        };
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
        let (parameters, returned) = rest.rsplit_once(')').expect("the parameters end");
        let returned = returned.trim().strip_prefix("-> ").unwrap_or("()");
        let parameters = parameters.trim().trim_end_matches(',').trim();
        out.push(format!("{}({parameters}) -> {returned}", name.trim()));
    }
    out
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
        let (parameters, returned) =
            rest.split(';').next().and_then(|rest| rest.rsplit_once(')')).expect("an end");
        let returned = returned.trim().strip_prefix("-> ").unwrap_or("()");
        let parameters = parameters.trim().trim_end_matches(',').trim();
        out.push(format!("{name}({parameters}) -> {returned}"));
    }
    out
}

#[test]
fn callbacks_are_the_same_in_the_same_order() {
    let (c, rust) = (c_callbacks(), rust_callbacks());
    assert_eq!(c.len(), 4, "the header was parsed incorrectly: {c:#?}");
    assert_eq!(c, rust);
}

/// `name { field: type, … }` for every struct.
fn c_structs() -> Vec<String> {
    let text = headers();
    let mut out = Vec::new();
    for part in text.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once(" { ") else {
            continue;
        };
        if name.contains(';') {
            continue; // an opaque struct
        }
        let fields = rest.split('}').next().expect("a struct ends");
        let fields = fields.split(';').filter(|field| !field.trim().is_empty()).map(|field| {
            match field.split_once('[') {
                Some((field, length)) => {
                    let (name, kind) = c_declaration(field);
                    let length = length.trim_end_matches(']').trim_start_matches("TAMP_");
                    format!("{name}: [{kind}; {length}]")
                }
                None => {
                    let (name, kind) = c_declaration(field);
                    format!("{name}: {kind}")
                }
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
        let Some((name, value)) = part.split_once(" = ") else {
            continue;
        };
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
