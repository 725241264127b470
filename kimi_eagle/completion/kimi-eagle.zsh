#compdef kimi-eagle
# Completion of kimi-eagle for zsh. In ~/.zshrc, after compinit: source <(kimi-eagle completion zsh)
_kimi_eagle() {
    local -a lines described more
    local line
    lines=("${(@f)$("${(e)~words[1]}" _complete zsh "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    local flags=" ${lines[1]} "
    for line in "${(@)lines[2,-1]}"; do
        described+=("${${line%%$'\t'*}//:/\\:}${${(M)line:#*$'\t'*}:+:${line#*$'\t'}}")
    done
    [[ $flags == *' nospace '* ]] && more=(-S '')
    (( $#described )) && _describe -V kimi-eagle described "${more[@]}"
    [[ $flags == *' files '* ]] && _files
    [[ $flags == *' folders '* ]] && _files -/
}
if [[ $funcstack[1] == _kimi_eagle ]]; then
    _kimi_eagle "$@"
else
    compdef _kimi_eagle kimi-eagle
fi
