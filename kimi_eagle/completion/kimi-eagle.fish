# Completion of kimi-eagle for fish. In config.fish: kimi-eagle completion fish | source
function __kimi_eagle_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -q current[1]; or set current ''
    set -l lines (eval $words[1] _complete fish (string escape -- $words[2..-1] $current) 2>/dev/null)
    test (count $lines) -gt 1; and printf '%s\n' $lines[2..-1]
    string match -q '*files*' -- "$lines[1]"; and __fish_complete_path "$current"
    string match -q '*folders*' -- "$lines[1]"; and __fish_complete_directories "$current" ''
    return 0
end
complete -c kimi-eagle -f -k -a '(__kimi_eagle_complete)'
