// PTX text to a Program.
#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>

#include "ptx.h"

namespace executor {
namespace {

std::string trim(const std::string& s) {
  size_t a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

bool starts_with(const std::string& s, const char* prefix) { return s.compare(0, strlen(prefix), prefix) == 0; }

std::optional<uint64_t> literal(const std::string& s) {
  try {
    size_t used = 0;
    uint64_t value;
    if (starts_with(s, "0f") || starts_with(s, "0F") || starts_with(s, "0d") || starts_with(s, "0D")) {
      value = std::stoull(s.substr(2), &used, 16), used += 2;
    } else if (starts_with(s, "-")) {
      value = -std::stoull(s.substr(1), &used, 0), used += 1;
    } else {
      value = std::stoull(s, &used, 0);
    }
    if (s.size() > used && s.substr(used) == "U") used++;
    return used == s.size() ? std::optional(value) : std::nullopt;
  } catch (const std::logic_error&) {
    return std::nullopt;
  }
}

// The operands of a statement: groups in braces are flattened, addresses in brackets stay whole.
struct Parts {
  std::vector<std::string> operands;
  int groups = 0;
  bool first_is_group = false;
};

Parts split_operands(const std::string& text) {
  Parts parts;
  std::string current;
  int brackets = 0;
  auto flush = [&] {
    if (!trim(current).empty()) parts.operands.push_back(trim(current));
    current.clear();
  };
  for (char c : text) {
    if (c == '{') parts.first_is_group |= parts.operands.empty() && trim(current).empty(), parts.groups++;
    else if (c == '}') continue;
    else if (c == ',' && !brackets) flush();
    else brackets += (c == '[') - (c == ']'), current += c;
  }
  flush();
  return parts;
}

// The spelling under which an opcode is defined: without cache hints, which change no value, and with a mark where
// braces tell two forms of one opcode apart.
std::string spelling(std::string opcode, const Parts& parts) {
  for (const char* hint :
       {".nc", ".L1::evict_last", ".L1::evict_first", ".L1::no_allocate", ".L2::128B", ".relaxed", ".gpu", ".weak"}) {
    size_t at = opcode.find(hint);
    if (at != std::string::npos) opcode.erase(at, strlen(hint));
  }
  if (starts_with(opcode, "mov.") && parts.groups) opcode += parts.first_is_group ? " unpack" : " pack";
  if (starts_with(opcode, "wgmma.mma")) opcode += parts.groups == 2 ? " registers" : " shared";
  return opcode;
}

class Parser {
 public:
  explicit Parser(int arch) : arch_(arch) {}

  Program run(const std::string& text) {
    std::istringstream in(text);
    std::string line;
    while (!done_ && std::getline(in, line)) {
      line_++;
      try {
        read_line(line);
      } catch (const Error& e) {
        throw Error("line " + std::to_string(line_) + ": " + e.what() + " in '" + trim(line).substr(0, 120) + "'");
      }
    }
    if (program_.name.empty()) throw Error("no .entry: not the PTX of a kernel");
    if (!versioned_) throw Error("no .version and .target");
    resolve();
    return std::move(program_);
  }

 private:
  void read_line(std::string line) {
    if (size_t at = line.find(".loc\t"); at != std::string::npos) return read_location(line);
    if (size_t at = line.find("//"); at != std::string::npos) line.erase(at);
    line = trim(line);
    if (line.empty()) return;
    if (place_ == Place::module) return read_module(line);
    if (place_ == Place::header) return read_header(line);
    read_body(line);
  }

  void read_location(const std::string& line) {  // .loc 1 114 0 // decode.py:114:0 @[ ... ]
    size_t at = line.find("// ");
    if (at == std::string::npos) return;
    source_ = line.substr(at + 3);
    source_ = source_.substr(0, source_.find(' '));
  }

  void read_module(const std::string& line) {
    if (starts_with(line, ".version")) {
      double version = std::stod(line.substr(8));
      if (version < 7 || version >= 10) throw Error("PTX version outside 7.0 to 9.x");
      versioned_ = true;
    } else if (starts_with(line, ".target")) {
      int target = atoi(line.c_str() + line.find("sm_") + 3);
      if (target < 80 || target > 90) throw Error("compiled for another target than sm_80 to sm_90");
      if (target > arch_) throw Error("compiled for a newer device than sm_" + std::to_string(arch_));
    } else if (size_t entry = line.find(".entry "); entry != std::string::npos) {
      program_.name = trim(line.substr(entry + 7, line.find('(') - entry - 7));
      place_ = Place::header;
    }
  }

  void read_header(const std::string& line) {
    if (starts_with(line, ".param")) read_parameter(line);
    if (starts_with(line, ".reqntid")) program_.threads = atoi(line.c_str() + 9);
    if (line == "{") place_ = Place::body;
  }

  // .param .u64 .ptr .global .align 1 kernel_param_0,   or   .param .align 8 .b8 kernel_param_0[312]
  void read_parameter(const std::string& line) {
    int bytes = line.find("64") < line.find("_param_") ? 8 : line.find("16 ") < line.find("_param_") ? 2 : 4;
    int align = bytes;
    if (size_t bracket = line.find('['); bracket != std::string::npos)
      bytes = atoi(line.c_str() + bracket + 1), align = 8;
    parameter_end_ = (parameter_end_ + align - 1) / align * align;
    program_.parameters.push_back({parameter_end_, bytes});
    parameter_end_ += bytes;
  }

  void read_body(const std::string& line) {
    if (line == "}") {
      done_ = true;
      return;
    }
    if (line[0] == '.') {
      if (starts_with(line, ".reg")) declare(line);
      return;
    }
    if (line[0] == '$' && line.back() == ':') {
      labels_[line.substr(0, line.size() - 1)] = program_.code.size();
      return;
    }
    size_t from = 0;
    for (size_t end; (end = line.find(';', from)) != std::string::npos; from = end + 1)
      if (std::string s = trim(line.substr(from, end - from)); !s.empty()) statement(s);
    if (!trim(line.substr(from)).empty()) throw Error("a statement that does not end on its line");
  }

  void declare(const std::string& line) {  // .reg .b32 %r<1591>;
    std::istringstream words(line);
    std::string word, type, name;
    words >> word >> type >> name;
    int bytes = type == ".pred"                        ? 1
                : type.find("16") != std::string::npos ? 2
                : type.find("64") != std::string::npos ? 8
                                                       : 4;
    size_t bracket = name.find('<');
    if (bracket == std::string::npos) throw Error("a register declared without a range");
    widths_[name.substr(0, bracket)] = bytes;
  }

  int new_slot(int bytes) {
    int slot = program_.slots;
    program_.slots += bytes == 8 ? 2 : 1;
    return slot;
  }

  Operand constant(int bytes, uint64_t value) {
    auto [it, fresh] = constants_.insert({{bytes, value}, 0});
    if (fresh) it->second = new_slot(bytes), program_.constants.push_back({it->second, bytes, value});
    return {it->second, bytes, 0};
  }

  Operand special(const std::string& name) {
    auto [it, fresh] = program_.special.insert({name, 0});
    if (fresh) it->second = new_slot(4);
    return {it->second, 4, 0};
  }

  Operand register_named(const std::string& name) {
    size_t digits = name.find_last_not_of("0123456789") + 1;
    auto width = widths_.find(name.substr(0, digits));
    if (width == widths_.end()) throw Error("unknown operand " + name);
    auto [it, fresh] = registers_.insert({name, 0});
    if (fresh) it->second = new_slot(width->second);
    return {it->second, width->second, 0};
  }

  Operand value(const std::string& text, int bytes) {
    if (text == "_") return {new_slot(bytes), bytes, 0};  // a result that is thrown away
    if (text == "global_smem") return constant(4, SHARED_BASE);
    if (text[0] == '%')
      return text.find('.') != std::string::npos || text == "%laneid" ? special(text) : register_named(text);
    auto number = literal(text);
    if (!number) throw Error("unknown operand " + text);
    return constant(bytes, bytes == 1 ? (*number ? ALL_LANES : 0) : *number);
  }

  Operand address(const std::string& text, int bytes) {  // [ %rd2 + 16 ]
    if (text[0] != '[') throw Error("expected an address, got " + text);
    std::string base = trim(text.substr(1, text.size() - 2));
    int64_t offset = 0;
    if (size_t plus = base.find('+'); plus != std::string::npos) {
      offset = static_cast<int64_t>(literal(trim(base.substr(plus + 1))).value());
      base = trim(base.substr(0, plus));
    }
    if (size_t at = base.find("_param_"); at != std::string::npos) {
      size_t index = atoi(base.c_str() + at + 7);
      return {-1, 0, program_.parameters.at(index).offset + offset};
    }
    Operand operand = value(base, bytes);
    operand.offset = offset;
    return operand;
  }

  static int width_of(char kind) {
    return kind == 's' || kind == 'w' || kind == 'f' ? 4
           : kind == 'g'                             ? 8
           : kind == 'p'                             ? 1
           : kind == 'h'                             ? 2
                                                     : kind - '0';
  }

  Operand parse_operand(char kind, const std::string& text) {
    Operand operand;
    switch (kind) {
      case 'i':
        if (auto number = literal(text)) return {-1, 0, static_cast<int64_t>(*number)};
        throw Error("expected an integer, got " + text);
      case 's':
      case 'g':
      case 'P':
        operand = address(text, kind == 's' ? 4 : 8);
        break;
      default:
        operand = value(text, width_of(kind));
    }
    if ((kind == 'h' && operand.bytes >= 2) || (kind == 'f' && operand.bytes >= 4)) return operand;
    int expected = kind == 'P' ? 0 : width_of(kind);
    if (operand.bytes != expected)
      throw Error("operand " + text + " has " + std::to_string(operand.bytes) + " bytes, expected " +
                  std::to_string(expected));
    return operand;
  }

  void statement(std::string s) {
    Instruction i;
    i.line = line_, i.text = s, i.source = source_;
    if (s[0] == '@') {
      size_t end = s.find_first_of(" \t");
      i.negated = s[1] == '!';
      i.guard = register_named(s.substr(1 + i.negated, end - 1 - i.negated)).slot;
      s = trim(s.substr(end));
    }
    size_t end = s.find_first_of(" \t");
    Parts parts = split_operands(end == std::string::npos ? "" : s.substr(end));
    i.opcode = spelling(s.substr(0, end), parts);
    const Definition* definition = find_definition(i.opcode);
    if (!definition) {
      unknown_.push_back(i.opcode + " (line " + std::to_string(line_) + ")");
      return;
    }
    if (narrows(i.opcode, parts)) definition = find_definition(i.opcode + " of 8");
    if (!definition) throw Error("a conversion of a wider register");
    fill(i, *definition, parts.operands);
    program_.uses_wgmma |= starts_with(i.opcode, "wgmma.mma");
    program_.code.push_back(std::move(i));
  }

  // cvt.s64.s32 %rd1, %rd2 takes the low half of the wider register.
  bool narrows(const std::string& opcode, const Parts& parts) {
    return starts_with(opcode, "cvt.") && parts.operands.size() == 2 && parts.operands[1][0] == '%' &&
           opcode.find("64", opcode.rfind('.')) == std::string::npos && register_named(parts.operands[1]).bytes == 8;
  }

  void fill(Instruction& i, const Definition& definition, const std::vector<std::string>& texts) {
    i.run = definition.run, i.control = definition.control, i.collective = definition.collective;
    i.spread = starts_with(i.opcode, "selp")   ? Spread::select
               : starts_with(i.opcode, "shfl") ? Spread::shuffle
                                               : Spread::lane;
    // Undefined values may be computed with, as long as they reach no memory, address, predicate of a branch or matrix.
    const bool uses = starts_with(i.opcode, "st") || starts_with(i.opcode, "mma") || starts_with(i.opcode, "cp.") ||
                      starts_with(i.opcode, "wgmma");
    size_t most = definition.operands.size();
    if (texts.size() > most || texts.size() < std::min(most, definition.required))
      throw Error("expected " + std::to_string(most) + " operands, got " + std::to_string(texts.size()));
    for (size_t n = 0; n < texts.size(); n++) {
      if (definition.operands[n] == 'L') {
        branches_.push_back({program_.code.size(), texts[n]});
        continue;
      }
      Operand operand = parse_operand(definition.operands[n], texts[n]);
      i.operands.push_back(operand);
      const char kind = definition.operands[n];
      if (operand.slot < 0 || kind == 'w') continue;
      if (n < static_cast<size_t>(definition.outputs)) i.writes.push_back(operand.slot);
      else (uses || kind == 's' || kind == 'g' ? i.checked : i.reads).push_back(operand.slot);
    }
  }

  void resolve() {
    if (!unknown_.empty()) {
      std::sort(unknown_.begin(), unknown_.end());
      std::string names;
      for (size_t n = 0; n < unknown_.size() && n < 8; n++) names += (n ? ", " : "") + unknown_[n];
      throw Error("unknown instruction: " + names);
    }
    if (program_.threads % LANES || !program_.threads || program_.threads > 512)
      throw Error(".reqntid: expected a multiple of 32 up to 512, got " + std::to_string(program_.threads));
    for (auto& [at, label] : branches_) {
      if (!labels_.count(label)) throw Error("no label " + label);
      program_.code[at].target = labels_[label];
    }
  }

  enum class Place { module, header, body };

  int arch_, line_ = 0, parameter_end_ = 0;
  Place place_ = Place::module;
  bool done_ = false, versioned_ = false;
  std::string source_;
  Program program_;
  std::map<std::string, int> widths_, registers_;
  std::map<std::string, size_t> labels_;
  std::map<std::pair<int, uint64_t>, int> constants_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<std::string> unknown_;
};

}  // namespace

Program parse(const std::string& text, int arch) { return Parser(arch).run(text); }

}  // namespace executor
