//! Calls that are refused.

/// Asserts that a call has failed with an error of this pattern and, if a text is given, with this in its message.
#[macro_export]
macro_rules! assert_refused {
    ($result:expr, $pattern:pat $(if $guard:expr)? $(, $text:expr)?) => {{
        let error = $result.err().expect("it was not refused");
        assert!(matches!(error, $pattern $(if $guard)?), "another error: {error}");
        $(
            let (message, text) = (error.to_string(), $text);
            assert!(message.contains(text), "`{text}` is not in: {message}");
        )?
    }};
}
