//! Names of targets: any text is refused or prints as a text that reads as the same target.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock::target::Target;

fuzz_target!(|text: &str| {
    if let Ok(target) = text.parse::<Target>() {
        let printed = target.to_string();
        assert_eq!(printed.parse::<Target>().as_ref(), Ok(&target), "{printed}");
    }
});
