"""SGLang's server under measurement: models, cases, the server itself, and what is measured."""
