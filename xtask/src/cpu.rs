//! The CPU's support for low precision, from the text of /proc/cpuinfo, and what follows from it.

/// The properties of the CPU that matter for mixed precision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) model: Option<String>,
    /// The instructions that multiply in bf16. Without any, bf16 is emulated.
    pub(crate) bf16: Vec<&'static str>,
    /// The same for fp16.
    pub(crate) fp16: Vec<&'static str>,
}

/// The names that x86 and Arm use.
const BF16: [&str; 3] = ["amx_bf16", "avx512_bf16", "bf16"];
const FP16: [&str; 3] = ["amx_fp16", "avx512_fp16", "asimdhp"];

impl Cpu {
    /// The CPU that `cpuinfo` describes. Unknown text results in a CPU without a name and instructions.
    pub(crate) fn parse(cpuinfo: &str) -> Self {
        let flags = value(cpuinfo, "flags").or_else(|| value(cpuinfo, "Features"));
        let flags: Vec<_> = flags.unwrap_or_default().split_whitespace().collect();
        let has = |names: [&'static str; 3]| {
            names.into_iter().filter(|name| flags.contains(name)).collect()
        };
        let model = value(cpuinfo, "model name").map(str::to_owned);
        Self { model, bf16: has(BF16), fp16: has(FP16) }
    }

    /// The precision in which to train on it.
    pub(crate) fn advice(&self) -> &'static str {
        match (self.bf16.is_empty(), self.fp16.is_empty()) {
            (false, false) => {
                "On the CPU both bf16 autocast and fp16 autocast should be faster than fp32; bf16, the \
                 default there, needs no GradScaler."
            }
            (false, true) => {
                "On the CPU bf16 autocast should be faster than fp32; fp16 is far slower on this CPU: \
                 keep it for CUDA."
            }
            (true, false) => {
                "On the CPU fp16 autocast with a GradScaler should be faster than fp32; bf16 is \
                 emulated on this CPU."
            }
            (true, true) => {
                "On the CPU stay with fp32: this one emulates both bf16 and fp16, which is slower. Use \
                 autocast there only to try out what will run on CUDA."
            }
        }
    }
}

/// The value of the first line `name : value`.
fn value<'a>(cpuinfo: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find_map(|(key, value)| (key.trim() == name).then(|| value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_those_of_the_first_processor() {
        let two = "processor\t: 0\nmodel name\t: AMD EPYC\n\
                   flags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n\n\
                   processor\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu amx_fp16\n";
        let both = "flags : amx_bf16 avx512_bf16 amx_tile amx_fp16 avx512_fp16\n";
        let arm = "Features\t: fp asimd fphp asimdhp bf16\n";
        for (cpuinfo, bf16, fp16) in [
            (two, vec!["avx512_bf16"], vec![]),
            (both, vec!["amx_bf16", "avx512_bf16"], vec!["amx_fp16", "avx512_fp16"]),
            (arm, vec!["bf16"], vec!["asimdhp"]),
            ("", vec![], vec![]),
            ("flags fpu amx_bf16", vec![], vec![]),
        ] {
            let model = (cpuinfo == two).then(|| "AMD EPYC".to_owned());
            assert_eq!(Cpu::parse(cpuinfo), Cpu { model, bf16, fp16 });
        }
    }

    #[test]
    fn a_dtype_is_advised_where_the_cpu_has_instructions_for_it() {
        let cpu = |bf16: &str, fp16: &str| Cpu::parse(&format!("flags : {bf16} {fp16}"));
        assert!(cpu("", "").advice().contains("stay with fp32"));
        let bf16 = cpu("amx_bf16", "");
        assert!(bf16.advice().contains("bf16 autocast should be faster than fp32"));
        assert!(bf16.advice().contains("fp16 is far slower"));
        assert!(cpu("", "amx_fp16").advice().contains("fp16 autocast with a GradScaler"));
        assert!(
            cpu("amx_bf16", "amx_fp16").advice().contains("both bf16 autocast and fp16 autocast")
        );
    }
}
