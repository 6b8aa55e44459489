//! Names of targets: any text is refused or prints as a text that reads as the same target.
#![no_main]

use sealblock_stack::target::TargetName;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(target) = text.parse::<TargetName>() {
        let printed = target.to_string();
        assert_eq!(printed.parse::<TargetName>().as_ref(), Ok(&target), "{printed}");
    }
});
