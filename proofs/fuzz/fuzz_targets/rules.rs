//! Fault rules: any text is refused or prints as a text that reads as the same rules.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_layers_fault::Rules;

fuzz_target!(|text: &str| {
    if let Ok(rules) = text.parse::<Rules>() {
        let printed = rules.to_string();
        assert_eq!(printed.parse::<Rules>().as_ref(), Ok(&rules), "{printed}");
    }
});
