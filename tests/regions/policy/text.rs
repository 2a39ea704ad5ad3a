//! Policies and levels as text.

use rstest::rstest;
use tch::Kind::{BFloat16, Double, Float, Half};
use tch::nn::VarStore;
use tch::{Device, Kind};
use tch_amp::optim::{MasterWeights, Sgd};
use tch_amp::policy::{KeepF32, OptLevel, PolicyError};
use tch_amp::{Error, Policy};

use crate::policy::POLICY_KINDS;
use testkit::{gpus, to_f64};

const GPU: Device = Device::Cuda(0);

/// The results of `jmp.get_policy` of jmp 0.0.4, where "half" is fp16.
#[rstest]
#[case("full", [Float, Float, Float])]
#[case("half", [Half, Half, Half])]
#[case("f16", [Half, Half, Half])]
#[case("float16", [Half, Half, Half])]
#[case("bf16", [BFloat16, BFloat16, BFloat16])]
#[case("bfloat16", [BFloat16, BFloat16, BFloat16])]
#[case("f32", [Float, Float, Float])]
#[case("float32", [Float, Float, Float])]
#[case("f64", [Double, Double, Double])]
#[case("float64", [Double, Double, Double])]
#[case("c=f16", [Float, Half, Half])]
#[case("c=bf16", [Float, BFloat16, BFloat16])]
#[case("p=f16", [Half, Half, Half])]
#[case("o=f16", [Float, Float, Half])]
#[case("p=f16,c=f16", [Half, Half, Half])]
#[case("p=f16,c=bf16", [Half, BFloat16, BFloat16])]
#[case("p=bf16,o=f32", [BFloat16, BFloat16, Float])]
#[case("c=f16,o=f32", [Float, Half, Float])]
#[case("params=float32,compute=float16,output=float32", [Float, Half, Float])]
#[case("params=float64,compute=float32", [Double, Float, Float])]
#[case("o=f32,c=f16,p=bf16", [BFloat16, Half, Float])]
#[case("params=full,compute=half,output=full", [Float, Half, Float])]
#[case("compute=half", [Float, Half, Half])]
#[case("output=f16,params=bf16", [BFloat16, BFloat16, Half])]
#[case("p=full,c=bf16,o=full", [Float, BFloat16, Float])]
fn policies_are_read_as_jmp_reads_them(#[case] text: &str, #[case] want: [Kind; 3]) {
    let Policy { param, compute, output } = Policy::parse(text, GPU).unwrap();
    assert_eq!([param, compute, output], want);
}

#[rstest]
#[case("O0", Device::Cpu, [Float, Float, Float])]
#[case("O1", Device::Cpu, [Float, BFloat16, Float])]
#[case("O2", Device::Cpu, [BFloat16, BFloat16, Float])]
#[case("O3", Device::Cpu, [BFloat16, BFloat16, BFloat16])]
#[case("o1", GPU, [Float, Half, Float])]
#[case("O2", GPU, [Half, Half, Float])]
#[case("O3", Device::Mps, [Half, Half, Half])]
#[case("half", Device::Cpu, [BFloat16, BFloat16, BFloat16])]
#[case("c=half", Device::Cpu, [Float, BFloat16, BFloat16])]
#[case(" P = FP32 , C = Half,o=float ", GPU, [Float, Half, Float])]
#[case("BFloat16", GPU, [BFloat16, BFloat16, BFloat16])]
#[case("double", GPU, [Double, Double, Double])]
#[case("fp64", GPU, [Double, Double, Double])]
#[case("fp16", Device::Cpu, [Half, Half, Half])]
fn levels_devices_capitals_and_long_names_are_read_too(
    #[case] text: &str,
    #[case] device: Device,
    #[case] want: [Kind; 3],
) {
    let Policy { param, compute, output } = Policy::parse(text, device).unwrap();
    assert_eq!([param, compute, output], want);
}

#[rstest]
#[case("", "it is empty; write for example `params=")]
#[case("  ", "it is empty")]
#[case("float8", "`float8` is neither a dtype nor a level; dtypes are float32 (f32")]
#[case("O4", "`o4` is neither a dtype nor a level; dtypes are float32")]
#[case("p=", "`` is not a dtype for params; dtypes are float32")]
#[case("q=f16", "`q` cannot be set; set params (p), compute (c) and output (o)")]
#[case("p=f16,", "it has a comma with nothing before or after it")]
#[case("p=f16,,c=f16", "it has a comma with nothing before or after it")]
#[case(" ,p=f16", "it has a comma with nothing before or after it")]
#[case("p=f16,f32", "`f32` is not an assignment; write params=")]
#[case("f32,c=f16", "`f32` is not an assignment; write params=")]
#[case("c=int8", "`int8` is not a dtype for compute; dtypes are float32")]
#[case("c=O1", "`o1` is not a dtype for compute")]
#[case("p=f32,params=f16", "it sets params twice")]
#[case("p=f32=f16", "`f32=f16` is not a dtype for params; separate assignments by commas")]
#[case(
    "params=f32;compute=f16",
    "`f32;compute=f16` is not a dtype for params; separate assignments by commas"
)]
#[case("p=f32 c=f16", "`f32 c=f16` is not a dtype for params; separate assignments by commas")]
fn what_cannot_be_read_is_named_with_what_can(#[case] text: &str, #[case] problem: &str) {
    let error = Policy::parse(text, GPU).unwrap_err();
    assert!(matches!(&error, Error::Policy(PolicyError::Text { text: t, .. }) if t == text));
    let message = error.to_string();
    assert!(
        message.starts_with(&format!("cannot read the policy `{text}`: {problem}")),
        "{message}"
    );
    assert!(message.ends_with("`bf16`, `half` or `O1`"), "{message}");
}

#[test]
fn printed_policies_parse_again() {
    for param in POLICY_KINDS {
        for compute in POLICY_KINDS {
            for output in POLICY_KINDS {
                let policy = Policy { param, compute, output };
                assert_eq!(policy.to_string().parse::<Policy>().unwrap(), policy);
                let json = serde_json::to_string(&policy).unwrap();
                assert_eq!(json, format!("\"{policy}\""));
                assert_eq!(serde_json::from_str::<Policy>(&json).unwrap(), policy);
            }
        }
    }
}

#[test]
fn serialization_refuses_policies_that_would_not_parse() {
    let policy = Policy { param: Kind::Int64, ..Policy::FULL };
    assert!(serde_json::to_string(&policy).unwrap_err().to_string().contains("Int64"));
    assert!(serde_json::from_str::<Policy>("\"p=f7\"").unwrap_err().to_string().contains("`f7`"));
}

#[test]
fn parsing_without_a_device_uses_the_available_one() {
    let device = Device::cuda_if_available();
    for text in ["half", "O1", "O2", "O3", "c=half"] {
        assert_eq!(text.parse::<Policy>().unwrap(), Policy::parse(text, device).unwrap());
    }
}

const LEVELS: [OptLevel; 4] = [OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3];

#[test]
fn levels_are_parsed_and_printed() {
    for (text, level) in ["O0", "o1", " O2", "O3 "].into_iter().zip(LEVELS) {
        assert_eq!(text.parse::<OptLevel>().unwrap(), level);
        assert_eq!(level.to_string(), text.trim().to_uppercase());
    }
    let error = "O7".parse::<OptLevel>().unwrap_err().to_string();
    assert_eq!(error, "there is no level `O7`: write O0, O1, O2 or O3");
}

#[test]
fn all_levels_but_the_last_keep_norms_and_o2_has_masters() {
    let (norms, none) = (KeepF32::Norms, MasterWeights::None);
    assert_eq!(LEVELS.map(OptLevel::keep_f32), [norms, norms, norms, KeepF32::Nothing]);
    assert_eq!(LEVELS.map(OptLevel::master_weights), [none, none, MasterWeights::Float, none]);
}

/// Whether the scaler of each level is enabled, and its scale.
fn scalers(device: Device) -> [(bool, f64); 4] {
    LEVELS.map(|level| {
        let scaler = level.grad_scaler(device).unwrap();
        (scaler.is_enabled(), scaler.get_scale().unwrap())
    })
}

#[test]
fn mixed_levels_scale_in_fp16_and_only_skip_in_bf16() {
    let skips = [(false, 1.0), (true, 1.0), (true, 1.0), (false, 1.0)];
    assert_eq!(scalers(Device::Cpu), skips, "half precision is bf16 on a CPU");
    for gpu in gpus() {
        let scales = [(false, 1.0), (true, 65536.0), (true, 65536.0), (false, 1.0)];
        assert_eq!(scalers(gpu), scales, "{gpu:?}");
    }
}

#[test]
fn a_mixed_level_skips_a_non_finite_step_in_bf16() {
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = OptLevel::O1.grad_scaler(Device::Cpu).unwrap();
    for (factor, want) in [(f64::INFINITY, 1.0), (0.5, 0.5)] {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * factor).sum(Kind::Float)).unwrap();
        let stepped = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
        scaler.update().unwrap();
        assert_eq!((stepped, to_f64(&w)), (factor.is_finite(), vec![want; 2]));
    }
}
