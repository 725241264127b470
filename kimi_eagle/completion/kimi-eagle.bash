# Completion of kimi-eagle for bash. In ~/.bashrc: eval "$(kimi-eagle completion bash)"
_kimi_eagle() {
    local -a lines
    mapfile -t lines < <("${COMP_WORDS[0]/#\~/$HOME}" _complete bash \
        "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    local flags=" ${lines[0]-} "
    COMPREPLY=("${lines[@]:1}")
    [[ $flags == *' files '* ]] && compopt -o default
    [[ $flags == *' folders '* ]] && compopt -o dirnames
    [[ $flags == *' nospace '* ]] && compopt -o nospace
    return 0
}
complete -F _kimi_eagle -o nosort kimi-eagle
