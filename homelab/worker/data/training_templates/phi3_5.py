"""TRL's training template of phi3_5 (Apache-2.0, see this folder's __init__)."""

TEMPLATE = r'''{#- Training variant of the Phi-3.5 chat template (see phi3_5.jinja for the original).
    Modifications vs the original:
    - Added {% generation %} / {% endgeneration %} around assistant message output to support
      assistant-only loss masking in SFT training.
-#}
{%- for message in messages %}
    {%- if message['role'] == 'system' and message['content'] %}
        {{- '<|system|>\n' + message['content'] + '<|end|>\n' }}
    {%- elif message['role'] == 'user' %}
        {{- '<|user|>\n' + message['content'] + '<|end|>\n'}}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\n' }}
        {%- generation %}
        {{- message['content'] + '<|end|>\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n'}}
{%- elif messages[-1]['role'] == 'assistant' %}
    {%- generation %}
    {{- eos_token }}
    {%- endgeneration %}
{%- else %}
    {{- eos_token }}
{%- endif %}'''
