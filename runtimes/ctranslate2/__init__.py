"""Language and translation models on CTranslate2. `adapter` is the supervisor's side, `worker` runs in the environment."""
